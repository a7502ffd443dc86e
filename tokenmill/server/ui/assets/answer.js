// One message on the page: a question, or an answer with its thinking, tool calls, tokens and statistics.

import { button, copyText, duration, h, icon, iconButton, pretty, replace, shortNumber } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { tokenView } from "./tokens.js";

/** `actions`: the chat (edit, regenerate, choose, sendResults). `place`: the position of the message: its siblings,
 *  whether it is the last one, and the results of its tool calls ({results by call, first node, siblings}). */
export class MessageView {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.showsTokens = false;
    this.element = h("article", { class: `message ${node.role}`, "data-id": node.id, "aria-label": node.role === "user" ? "You" : "Answer" });
    this.body = h("div", { class: "body" });
    this.foot = h("div", { class: "foot" });
    if (node.role === "assistant") this.buildAnswer();
    else this.element.append(this.body, this.foot);
  }

  buildAnswer() {
    this.thought = h("div", { class: "thought-text" });
    this.thoughtLabel = h("span", {}, "Thinking");
    this.thinking = h("details", { class: "thinking", hidden: true }, h("summary", {}, icon("right"), this.thoughtLabel), this.thought);
    this.calls = h("div", { class: "calls" });
    this.error = h("div", { class: "problem", role: "alert", hidden: true });
    this.cards = new Map();
    this.element.append(this.thinking, this.body, this.calls, this.error, this.foot);
  }

  update(place, isLive) {
    this.element.classList.toggle("live", isLive);
    if (this.node.role === "user") this.updateQuestion(place);
    else this.updateAnswer(place, isLive);
  }

  // ── a question ───────────────────────────────────────────────────────────────────────────────────

  updateQuestion(place) {
    const pictures = (this.node.images || []).map((url) => h("img", { src: url, alt: "Attached picture" }));
    replace(this.body, pictures, this.node.content ? h("div", { class: "said" }, this.node.content) : null);
    replace(this.foot, this.branches(place), iconButton("copy", "Copy", () => copyText(this.node.content)), iconButton("edit", "Edit and resend in a new branch", () => this.edit()));
  }

  edit() {
    const area = h("textarea", { class: "edit", "aria-label": "Edit the question", value: this.node.content });
    const send = () => area.value.trim() && this.actions.editQuestion(this.node, area.value);
    const cancel = () => this.actions.refresh();
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
      if (event.key === "Escape") { event.stopPropagation(); cancel(); }
    });
    replace(this.body, area);
    replace(this.foot, button("Cancel", cancel), button("Send", send, "primary"));
    area.style.height = `${Math.min(area.scrollHeight + 4, 400)}px`;
    area.focus();
  }

  // ── an answer ────────────────────────────────────────────────────────────────────────────────────

  updateAnswer(place, isLive) {
    const { node } = this;
    this.updateThinking(isLive);
    if (this.showsTokens && node.tokens?.length && !isLive) {
      replace(this.body, tokenView(node.tokens));
      this.body.markdownBlocks = null;
    } else {
      if (!this.body.markdownBlocks) replace(this.body);
      renderMarkdown(this.body, node.content);
    }
    this.updateCalls(place, isLive);
    this.error.hidden = !node.error;
    this.error.textContent = node.error || "";
    const isEmpty = isLive && !node.content && !node.thinking && !node.calls?.length;
    this.element.classList.toggle("waiting", isEmpty);
    if (isLive) replace(this.foot);
    else this.updateFoot(place);
  }

  updateThinking(isLive) {
    const { node } = this;
    this.thinking.hidden = !node.thinking;
    if (!node.thinking) return;
    this.thought.textContent = node.thinking;
    const isThinking = isLive && !node.content && !node.calls?.length;
    this.thinking.classList.toggle("busy", isThinking);
    this.thoughtLabel.textContent = isThinking ? "Thinking …" : node.stats?.thoughtS > 0.05 ? `Thought for ${duration(node.stats.thoughtS)}` : "Thought";
  }

  updateFoot(place) {
    const { node } = this;
    const tokens = node.tokens?.length
      ? iconButton("tokens", "Token probabilities", () => { this.showsTokens = !this.showsTokens; this.update(place, false); }, { "aria-pressed": `${this.showsTokens}` })
      : null;
    replace(this.foot, this.branches(place), iconButton("copy", "Copy", () => copyText(node.content)),
      iconButton("again", "Regenerate in a new branch", () => this.actions.regenerate(node)), tokens, this.figures());
  }

  figures() {
    const { stats, finish, error } = this.node;
    const texts = [];
    if (!finish && !error) texts.push("interrupted"); // the page was closed while the answer was streamed
    if (finish === "stopped") texts.push("stopped");
    if (finish === "length") texts.push("cut at the token limit");
    if (stats?.completion) texts.push(`${shortNumber(stats.completion)} tokens`);
    if (stats?.rate) texts.push(`${shortNumber(stats.rate)} tokens/s`);
    if (stats?.ttftS) texts.push(`first token after ${duration(stats.ttftS)}`);
    if (stats?.prompt) texts.push(`prompt ${shortNumber(stats.prompt)}${stats.cached ? `, ${shortNumber(stats.cached)} cached` : ""}`);
    if (stats?.drafted) texts.push(`${Math.round((stats.accepted / stats.drafted) * 100)} % of draft tokens accepted`);
    return h("span", { class: "figures" }, texts.join(" · "));
  }

  branches({ siblings }) {
    return branchBar(siblings, this.node, this.actions);
  }

  // ── tool calls ───────────────────────────────────────────────────────────────────────────────────

  updateCalls({ answered, isLast }, isLive) {
    const results = answered?.results;
    const calls = this.node.calls || [];
    const isOpen = !isLive && isLast && calls.length > 0 && !["", "stopped"].includes(this.node.finish) && !this.node.error;
    for (const call of calls) this.updateCall(call, results?.[call.id], isOpen, isLive);
    this.send?.remove();
    this.send = null;
    if (isOpen) {
      const inputs = calls.map((call) => this.cards.get(call).input);
      this.send = this.sendButton(calls.length === 1 ? "Send result" : "Send results", inputs);
      this.calls.append(this.send);
    } else if (results && calls.length && !isLive) {
      this.send = h("div", { class: "foot calls-foot" }, branchBar(answered.siblings, answered.first, this.actions),
        button("Give another result", () => this.reopen(calls, results), "quiet", "edit"));
      this.calls.append(this.send);
    }
  }

  updateCall(call, result, isOpen, isLive) {
    let card = this.cards.get(call);
    if (!card) {
      card = { code: h("pre", { class: "arguments", tabindex: 0 }), outcome: h("div", { class: "outcome" }), state: h("span", { class: "state" }) };
      card.element = h("section", { class: "call-card", "aria-label": `Tool call ${call.name}` },
        h("header", {}, icon("tool"), h("strong", {}, call.name), card.state), card.code, card.outcome);
      this.cards.set(call, card);
      this.calls.append(card.element);
    }
    card.code.textContent = isLive ? call.arguments : pretty(call.arguments);
    card.state.textContent = result !== undefined ? "answered" : isLive ? "writing arguments …" : isOpen ? "waiting for your result" : "not answered";
    if (result !== undefined) replace(card.outcome, h("pre", { class: "result", tabindex: 0 }, pretty(result)));
    else if (isOpen && !card.input) {
      card.input = resultBox(call, "");
      replace(card.outcome, card.input);
    } else if (!isOpen) replace(card.outcome);
  }

  reopen(calls, results) {
    const inputs = calls.map((call) => {
      const input = resultBox(call, results[call.id] ?? "");
      replace(this.cards.get(call).outcome, input);
      return input;
    });
    replace(this.send, button("Cancel", () => this.actions.refresh()), this.sendButton("Send and go on", inputs));
    inputs[0].focus();
  }

  sendButton(label, inputs) {
    return button(label, () => this.actions.sendResults(this.node, inputs.map((input) => input.value)), "primary");
  }
}

function branchBar(siblings, node, actions) {
  if (!siblings || siblings.length < 2) return null;
  const at = siblings.indexOf(node);
  const go = (step) => actions.choose(siblings[at + step]);
  return h("span", { class: "branches" },
    iconButton("left", "Earlier branch", () => go(-1), { disabled: at === 0 }), h("span", {}, `${at + 1} / ${siblings.length}`),
    iconButton("right", "Later branch", () => go(1), { disabled: at === siblings.length - 1 }));
}

function resultBox(call, value) {
  return h("textarea", { class: "result-input", rows: 3, placeholder: "Result of the tool: text or JSON", "aria-label": `Result of ${call.name}`, value });
}
