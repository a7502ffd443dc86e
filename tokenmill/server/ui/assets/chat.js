// The chat: the list of conversations, the messages of the open one, the input box, and the answers being streamed.

import { ApiError, call, capabilities, events, getJson, reasonOf, storedKey } from "./api.js";
import { MessageView } from "./answer.js";
import { codeSample, SAMPLE_NAMES } from "./code_samples.js";
import { addNode, choose, children, exported, imported, newConversation, path, pathTo, requestBody, siblings } from "./conversation.js";
import { button, confirmed, copyText, dialog, h, icon, iconButton, replace, saveFile, toast } from "./dom.js";
import { allConversations, getConversation, keepConversation, removeConversation } from "./library.js";
import { SettingsPanel, wrongSettings } from "./settings.js";
import { readLogprobs } from "./tokens.js";

const NEW_CHAT = "#/chat"; // the address of a conversation without messages
const LAST_SETTINGS = "tokenmill-settings";
const MAX_PICTURE_BYTES = 5e6;
const RETRY_MS = 3000;
const SAVE_EVERY_MS = 1000; // while an answer streams
const MIN_TIMED_S = 0.02; // no speed is shown for an answer that arrived all at once

export class ChatView {
  constructor(sidebar) {
    this.sidebar = sidebar;
    this.current = null;
    this.runs = new Map(); // conversation id -> the answer being streamed
    this.views = new Map(); // node id -> MessageView
    this.pictures = [];
    this.settings = new SettingsPanel((conversation) => this.settingsChanged(conversation));
    this.build();
  }

  build() {
    this.modelChoice = h("select", { class: "model-choice", "aria-label": "Model", onchange: () => this.modelChanged() });
    this.title = h("span", { class: "chat-title" });
    const bar = h("header", { class: "bar" }, this.modelChoice, this.title,
      iconButton("code", "Copy as code", () => this.copyAs()), iconButton("down", "Export this conversation", () => this.exportOne()),
      iconButton("tune", "Parameters (Alt+S)", () => this.toggleSettings(), { class: "icon-button settings-button" }));
    this.list = h("div", { class: "messages", role: "log", "aria-live": "off" });
    this.scroller = h("div", { class: "scroller", tabindex: -1 }, this.list);
    this.element = h("section", { class: "chat" }, h("div", { class: "chat-main" }, bar, this.scroller, this.composer()), this.settings.element);
    this.scroller.addEventListener("scroll", () => {
      this.follows = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight < 60;
    });
    addEventListener("pagehide", () => (this.isLeft = true)); // requests that end from now on are interrupted, not failed
    addEventListener("pageshow", () => (this.isLeft = false));
    this.buildSidebar();
  }

  composer() {
    this.input = h("textarea", { class: "ask", rows: 1, placeholder: "Send a message", "aria-label": "Your message", oninput: () => this.fitInput() });
    this.input.addEventListener("keydown", (event) => this.inputKey(event));
    this.input.addEventListener("paste", (event) => this.takeFiles(event.clipboardData.files, event));
    this.sendButton = h("button", { type: "button", class: "send", onclick: () => (this.run() ? this.stop() : this.ask()) });
    this.tray = h("div", { class: "tray" });
    const file = h("input", { type: "file", accept: "image/png,image/jpeg,image/webp,image/gif", multiple: true, hidden: true, onchange: () => { this.takeFiles(file.files); file.value = ""; } });
    const box = h("div", { class: "composer" }, this.tray, h("div", { class: "composer-row" }, iconButton("image", "Attach a picture", () => this.pickPicture(file)), file, this.input, this.sendButton));
    box.addEventListener("dragover", (event) => event.preventDefault());
    box.addEventListener("drop", (event) => { event.preventDefault(); this.takeFiles(event.dataTransfer.files); });
    return h("div", { class: "composer-area" }, box);
  }

  inputKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.run()) this.ask();
    } else if (event.key === "ArrowUp" && !this.input.value) {
      const last = path(this.current).filter((node) => node.role === "user").pop();
      if (last) { event.preventDefault(); this.views.get(last.id).edit(); }
    }
  }

  fitInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, 240)}px`;
  }

  // ── conversations ────────────────────────────────────────────────────────────────────────────────

  buildSidebar() {
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: () => this.listConversations() });
    this.conversations = h("nav", { class: "conversations", "aria-label": "Conversations" });
    const file = h("input", { type: "file", accept: "application/json,.json", hidden: true, onchange: () => { this.importFile(file.files[0]); file.value = ""; } });
    replace(this.sidebar, button("New chat", () => this.startNew(), "new-chat", "plus"),
      h("div", { class: "search-box" }, icon("search"), this.search), this.conversations,
      h("div", { class: "library-tools" }, button("Export all", () => this.exportAll(), "quiet", "down"),
        button("Import", () => file.click(), "quiet", "up"), file));
  }

  async listConversations() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = (await allConversations().catch(() => [])).filter((one) => matches(one, words));
    replace(this.conversations, found.map((one) => h("div", { class: "conversation" },
      h("a", { href: `#/chat/${one.id}`, "aria-current": one.id === this.current?.id ? "page" : null, title: one.title }, one.title || "New chat"),
      iconButton("trash", "Delete", () => this.remove(one)))),
    found.length ? null : h("p", { class: "muted small" }, words.length ? "No conversation found." : "Conversations are stored in this browser only."));
  }

  async open(id) {
    const turn = (this.turn = (this.turn || 0) + 1);
    const focused = document.activeElement;
    const running = id && this.runs.get(id)?.conversation;
    const found = running || (id && (await getConversation(id).catch(() => null)));
    if (turn !== this.turn) return; // another conversation was opened meanwhile
    if (id && !found) {
      toast("This conversation no longer exists in this browser.");
      history.replaceState(null, "", NEW_CHAT);
    }
    if (found && found === this.current) return;
    this.current = found || newConversation(this.model(), lastSettings());
    if (found && this.models?.includes(found.model)) this.modelChoice.value = found.model;
    else this.current.model = this.model();
    this.views.clear();
    this.follows = true;
    this.settings.show(this.current);
    this.refresh();
    this.listConversations();
    // Not on phones, where it would open the keyboard, and not if the user has moved the focus meanwhile.
    if (!id && matchMedia("(min-width: 781px)").matches && document.activeElement === focused) this.input.focus();
  }

  /** Called when the page is looked at again: another tab may have gone on with this conversation. */
  async show() {
    const { current } = this;
    if (!current || this.run()) return;
    const kept = await getConversation(current.id).catch(() => null);
    if (kept?.updated > current.updated && current === this.current && !this.run()) this.open(kept.id);
  }

  startNew() {
    if (location.hash === NEW_CHAT) this.open(null);
    else location.hash = NEW_CHAT;
  }

  async remove(conversation) {
    if (!(await confirmed("Delete this conversation?", `“${conversation.title}” and all of its branches are deleted from this browser.`, "Delete"))) return;
    const run = this.runs.get(conversation.id);
    this.runs.delete(conversation.id); // so that the rest of its answer is not stored
    run?.controller.abort();
    clearTimeout(this.saving);
    await removeConversation(conversation.id);
    if (conversation.id === this.current?.id) this.startNew();
    this.listConversations();
  }

  async keep(conversation) {
    if (!Object.keys(conversation.nodes).length) return;
    try {
      await keepConversation(structuredClone(conversation));
    } catch (error) {
      toast(`This browser could not store the conversation: ${error.message}`, "error");
    }
    if (conversation === this.current && ["", "#/", NEW_CHAT].includes(location.hash)) history.replaceState(null, "", `#/chat/${conversation.id}`);
    this.listConversations();
  }

  exportOne() {
    if (path(this.current).length) saveFile(`${fileName(this.current.title)}.json`, exported([this.current]));
    else toast("This conversation is empty.");
  }

  async exportAll() {
    saveFile("tokenmill-conversations.json", exported(await allConversations()));
  }

  async importFile(file) {
    try {
      const found = imported(await file.text());
      for (const one of found) await keepConversation(one);
      toast(`${found.length} conversation${found.length === 1 ? "" : "s"} imported`);
      if (found.length) location.hash = `#/chat/${found[0].id}`;
      this.listConversations();
    } catch (error) {
      toast(`The file could not be imported: ${error.message}`, "error");
    }
  }

  // ── models and settings ──────────────────────────────────────────────────────────────────────────

  async loadModels() {
    try {
      this.models = (await getJson("/v1/models")).data.map((one) => one.id);
    } catch (error) {
      this.models = [];
      if (error.status === 503) setTimeout(() => this.loadModels(), RETRY_MS); // still loading
      toast(reasonOf(error), error.status === 503 ? "note" : "error");
    }
    const model = this.current?.model;
    replace(this.modelChoice, this.models.map((name) => h("option", { value: name }, name)));
    if (this.models.includes(model)) this.modelChoice.value = model;
    if (this.current) this.modelChanged();
  }

  model() {
    return this.modelChoice.value;
  }

  modelChanged() {
    if (this.current.model === this.model()) return;
    this.current.model = this.model();
    this.settings.show(this.current);
    this.keep(this.current);
  }

  settingsChanged(conversation) {
    localStorage.setItem(LAST_SETTINGS, JSON.stringify(conversation.settings));
    clearTimeout(this.saving);
    this.saving = setTimeout(() => this.keep(conversation), 400);
  }

  toggleSettings() {
    this.settings.element.hidden = !this.settings.element.hidden;
    this.element.classList.toggle("with-settings", !this.settings.element.hidden);
    if (!this.settings.element.hidden) this.settings.element.querySelector("textarea").focus();
  }

  // ── pictures ─────────────────────────────────────────────────────────────────────────────────────

  async pickPicture(file) {
    if (await this.takesPictures()) file.click();
  }

  async takesPictures() {
    if ((await capabilities(this.model())).includes("vision")) return true;
    toast(`${this.model()} reads text only and does not accept pictures.`);
    return false;
  }

  async takeFiles(files, event) {
    const pictures = [...files].filter((file) => file.type.startsWith("image/"));
    if (!pictures.length) return;
    event?.preventDefault();
    if (!(await this.takesPictures())) return;
    for (const file of pictures) {
      if (file.size > MAX_PICTURE_BYTES) toast(`${file.name} is larger than 5 MB.`, "error");
      else this.pictures.push(await dataUrl(file));
    }
    this.showTray();
  }

  showTray() {
    replace(this.tray, this.pictures.map((url, at) => h("div", { class: "thumb" }, h("img", { src: url, alt: "Picture to send" }),
      iconButton("close", "Remove", () => { this.pictures.splice(at, 1); this.showTray(); }))));
  }

  // ── sending messages ─────────────────────────────────────────────────────────────────────────────

  run() {
    return this.current && this.runs.get(this.current.id);
  }

  ask() {
    const content = this.input.value.trim();
    if ((!content && !this.pictures.length) || !this.isReady()) return;
    const leaf = path(this.current).pop();
    const node = addNode(this.current, leaf?.id, { role: "user", content, images: this.pictures });
    this.pictures = [];
    this.showTray();
    this.input.value = "";
    this.fitInput();
    this.answer(node);
  }

  isReady() {
    const problem = wrongSettings(this.current.settings) || (this.model() ? "" : "No model is available.");
    if (problem) toast(problem, "error");
    return !problem;
  }

  editQuestion(node, content) {
    if (!this.isReady()) return;
    this.stop();
    this.answer(addNode(this.current, parentOf(node), { role: "user", content, images: node.images || [] }));
  }

  regenerate(node) {
    if (!this.isReady()) return;
    this.stop();
    this.answer(this.current.nodes[node.parent]);
  }

  regenerateLast() {
    const last = path(this.current).filter((node) => node.role === "assistant").pop();
    if (last) this.regenerate(last);
  }

  sendResults(node, results) {
    if (!this.isReady()) return;
    let parent = node;
    node.calls.forEach((one, at) => { parent = addNode(this.current, parent.id, { role: "tool", callId: one.id, content: results[at] }); });
    this.answer(parent);
  }

  choose(node) {
    choose(this.current, node);
    this.keep(this.current);
    this.refresh();
  }

  stop() {
    this.run()?.controller.abort();
  }

  async answer(question) {
    const conversation = this.current;
    const node = addNode(conversation, question.id, { role: "assistant", model: conversation.model, thinking: "", calls: [], tokens: [], stats: {}, finish: "", error: "" });
    const run = { conversation, node, controller: new AbortController(), started: performance.now(), saved: 0 };
    this.runs.set(conversation.id, run);
    this.follows = true;
    this.refresh();
    this.keep(conversation);
    try {
      const body = requestBody(conversation, pathTo(conversation, question.id));
      await this.stream(run, body);
    } catch (error) {
      if (error.name === "AbortError") node.finish = "stopped";
      else if (!this.isLeft) node.error = reasonOf(error);
    }
    finishStats(run);
    if (this.runs.get(conversation.id) !== run) return; // replaced by a newer run, which stores all of it, or deleted
    this.runs.delete(conversation.id);
    await this.keep(conversation);
    if (this.current === conversation) this.refresh();
  }

  async stream(run, body) {
    const response = await call("/v1/chat/completions", { method: "POST", body, signal: run.controller.signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 500, chunk.error.code);
      if (chunk.usage) noteUsage(run, chunk.usage);
      if (chunk.choices[0]) noteDelta(run, chunk.choices[0]);
      this.paintSoon(run);
    }
  }

  /** Draw the answer on the next animation frame, and store it every SAVE_EVERY_MS. */
  paintSoon(run) {
    if (run.isPainting) return;
    run.isPainting = true;
    requestAnimationFrame(() => {
      run.isPainting = false;
      if (this.runs.get(run.conversation.id) !== run) return;
      if (performance.now() - run.saved > SAVE_EVERY_MS) { run.saved = performance.now(); this.keep(run.conversation); }
      if (run.conversation !== this.current) return;
      this.views.get(run.node.id)?.update(this.place(run.node, path(this.current)), true);
      this.follow();
    });
  }

  // ── rendering ────────────────────────────────────────────────────────────────────────────────────

  refresh() {
    const nodes = path(this.current);
    const run = this.run();
    const shown = nodes.filter((node) => node.role !== "tool").map((node) => {
      if (!this.views.has(node.id) || this.views.get(node.id).node !== node) this.views.set(node.id, new MessageView(node, this));
      const view = this.views.get(node.id);
      view.update(this.place(node, nodes), run?.node === node);
      return view.element;
    });
    replace(this.list, shown.length ? shown : this.welcome());
    this.title.textContent = this.current.title;
    this.sendButton.title = run ? "Stop (Esc)" : "Send (Enter)";
    this.sendButton.setAttribute("aria-label", run ? "Stop" : "Send");
    this.sendButton.classList.toggle("stop", Boolean(run));
    replace(this.sendButton, icon(run ? "stop" : "send"));
    this.follow();
  }

  place(node, nodes) {
    const place = { siblings: siblings(this.current, node), isLast: nodes[nodes.length - 1] === node };
    const first = nodes[nodes.indexOf(node) + 1];
    if (first?.role === "tool") {
      const below = nodes.slice(nodes.indexOf(first)).filter((one) => one.role === "tool" && node.calls.some((call) => call.id === one.callId));
      place.answered = { first, siblings: children(this.current, node.id), results: Object.fromEntries(below.map((one) => [one.callId, one.content])) };
    }
    return place;
  }

  follow() {
    if (this.follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  welcome() {
    const ideas = ["Explain how a water mill works, in three sentences.", "Write a Python function that merges two sorted lists.", "Make a table of three European rivers and their lengths."];
    return h("div", { class: "welcome" }, h("h1", {}, "What would you like to know?"), h("p", { class: "muted" }, "The models run on this server. Conversations are stored in this browser."),
      h("div", { class: "ideas" }, ideas.map((text) => button(text, () => { this.input.value = text; this.ask(); }))));
  }

  copyAs() {
    if (!this.isReady()) return;
    const nodes = path(this.current);
    while (nodes.length && nodes[nodes.length - 1].role === "assistant") nodes.pop(); // end with the last question
    if (!nodes.length) nodes.push({ role: "user", content: this.input.value || "Hello" });
    const shown = h("pre", { class: "sample", tabindex: 0 });
    const tabs = SAMPLE_NAMES.map((name) => h("button", { type: "button", role: "tab", onclick: () => pick(name) }, name));
    const pick = (name) => {
      shown.textContent = codeSample(name, requestBody(this.current, nodes), location.origin, Boolean(storedKey()));
      tabs.forEach((tab) => tab.setAttribute("aria-selected", `${tab.textContent === name}`));
    };
    pick(SAMPLE_NAMES[0]);
    dialog("Copy as code", h("div", {}, h("div", { class: "tabs", role: "tablist" }, tabs), shown), [{ label: "Copy", kind: "primary", action: () => { copyText(shown.textContent); return false; } }]);
  }
}

// ── the stream of one answer ─────────────────────────────────────────────────────────────────────────

function noteDelta(run, choice) {
  const { node } = run;
  const delta = choice.delta || {};
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (delta.content || thought || delta.tool_calls) {
    run.first ??= performance.now();
    run.last = performance.now();
  }
  if (thought) node.thinking += thought;
  if ((delta.content || delta.tool_calls) && node.thinking && !node.stats.thoughtS) node.stats.thoughtS = (performance.now() - run.first) / 1000;
  if (delta.content) node.content += delta.content;
  for (const part of delta.tool_calls || []) {
    const call = (node.calls[part.index] ||= { id: "", name: "", arguments: "" });
    if (part.id) call.id = part.id;
    if (part.function?.name) call.name += part.function.name;
    if (part.function?.arguments) call.arguments += part.function.arguments;
  }
  if (choice.logprobs?.content) node.tokens.push(...readLogprobs(choice.logprobs.content));
  if (choice.finish_reason) node.finish = choice.finish_reason;
}

function noteUsage(run, usage) {
  Object.assign(run.node.stats, {
    prompt: usage.prompt_tokens, completion: usage.completion_tokens, cached: usage.prompt_tokens_details?.cached_tokens || 0,
    drafted: usage.speculation?.proposed || 0, accepted: usage.speculation?.accepted || 0,
  });
}

function finishStats(run) {
  const { stats } = run.node;
  if (run.first === undefined) return;
  stats.ttftS = (run.first - run.started) / 1000;
  const seconds = (run.last - run.first) / 1000;
  if (stats.completion > 1 && seconds > MIN_TIMED_S) stats.rate = (stats.completion - 1) / seconds;
}

// ── helpers ──────────────────────────────────────────────────────────────────────────────────────────

function parentOf(node) {
  return node.parent === "root" ? null : node.parent;
}

function matches(conversation, words) {
  if (!words.length) return true;
  const text = [conversation.title, ...Object.values(conversation.nodes).map((node) => node.content)].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

function lastSettings() {
  try {
    return JSON.parse(localStorage.getItem(LAST_SETTINGS)) || {};
  } catch {
    return {};
  }
}

function fileName(title) {
  return title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
