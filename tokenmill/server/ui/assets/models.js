// The models view: served models and their states, downloaded models, and the catalog with what fits this machine.

import { call, getJson, objects, order, reasonOf } from "./api.js";
import { button, bytes, confirmed, duration, h, icon, replace, shortNumber, toast } from "./dom.js";

const REFRESH_MS = 3000; // while the view is open
const pulls = new Map(); // model name -> running download, which continues while the view is hidden

export class ModelsView {
  constructor(onchange) {
    this.onchange = onchange; // called when the list of served models changes
    this.served = h("div", { class: "rows" });
    this.stored = h("div", { class: "rows" });
    this.catalog = h("div", { class: "rows" });
    this.machine = h("p", { class: "muted" });
    this.name = h("input", { type: "text", placeholder: "Name or Hugging Face id", "aria-label": "Model to pull" });
    this.form = h("form", { class: "pull-form" }, this.name, h("button", { class: "primary" }, icon("down"), "Pull"));
    this.form.addEventListener("submit", (event) => { event.preventDefault(); if (this.name.value.trim()) this.pull(this.name.value.trim()); this.name.value = ""; });
    this.notice = h("p", { class: "notice", hidden: true }, "Clients may not change the models of this server (see --manage-models).");
    this.element = h("section", { class: "page models", "aria-label": "Models" }, h("header", { class: "page-head" }, h("h1", {}, "Models")), this.machine, this.notice,
      h("h2", {}, "Served"), this.served, h("h2", {}, "Downloaded"), this.stored, h("h2", {}, "Catalog"), this.form, this.catalog);
  }

  show() {
    clearInterval(this.timer);
    this.timer = setInterval(() => this.refresh(false), REFRESH_MS);
    this.refresh(true);
  }

  hide() {
    clearInterval(this.timer);
  }

  async refresh(showsError) {
    try {
      this.lists = await getJson("/ui/models");
    } catch (error) {
      if (showsError) toast(reasonOf(error), "error");
      return;
    }
    this.draw();
  }

  draw() {
    const { lists } = this;
    if (!lists) return;
    const names = new Set(lists.served.map((row) => row.id));
    this.notice.hidden = lists.can_manage;
    this.form.hidden = !lists.can_manage;
    this.machine.textContent = lists.device ? `${lists.device}: ${bytes(lists.available_bytes)} for models` : "";
    keepFocus(this.served, lists.served.map((row) => this.servedRow(row)));
    const others = lists.stored.filter((one) => !names.has(one.name));
    keepFocus(this.stored, others.length ? others.map((one) => this.storedRow(one)) : [h("p", { class: "muted" }, "No other model is downloaded.")]);
    const catalogued = new Set(lists.catalog.map((one) => one.name));
    const extra = [...pulls.keys()].filter((name) => !catalogued.has(name)).map((name) => ({ name, about: "", is_stored: false }));
    keepFocus(this.catalog, [...extra, ...lists.catalog].map((one) => this.catalogRow(one)));
  }

  servedRow(row) {
    const state = row.status.value;
    const facts = [row.max_model_len && `context ${row.max_model_len.toLocaleString("en")}`, row.memory_bytes && bytes(row.memory_bytes), row.device,
      row.num_running && `${row.num_running} running`, row.num_waiting && `${row.num_waiting} waiting`, row.parent && `based on ${row.parent}`,
      row.aliases?.length && `also called ${row.aliases.join(", ")}`, row.expires_in_s != null && `unloads in ${duration(Math.ceil(row.expires_in_s))}`];
    const action = !this.lists.can_manage || row.parent || row.is_pinned ? null
      : state === "loaded" ? button("Unload", () => this.order("/models/unload", row.id)) : ["unloaded", "failed"].includes(state) ? button("Load", () => this.order("/models/load", row.id)) : null;
    return line(row.id, row.status.reason || "", facts, [badge(state, stateKind(state)), action]);
  }

  storedRow(one) {
    const remove = this.lists.can_manage ? button("Delete", () => this.remove(one), "danger quiet") : null;
    const load = this.lists.can_manage ? button("Load", () => this.order("/models/load", one.name)) : null;
    return line(one.name, one.about, [bytes(one.size_bytes), one.source, fitText(one.fit)], [fitBadge(one.fit), load, remove]);
  }

  catalogRow(one) {
    const running = pulls.get(one.name);
    const tail = running ? [progress(running), button("Cancel", () => running.controller.abort())]
      : [fitBadge(one.fit), one.is_stored ? badge("downloaded", "good") : this.lists.can_manage ? button("Pull", () => this.pull(one.name)) : null];
    return line(one.name, one.about, [bytes(one.size_bytes), one.license, fitText(one.fit)], tail);
  }

  // ── changes ──────────────────────────────────────────────────────────────────────────────────────

  async order(path, model, method = "POST", message = "") {
    await order(path, method, { model }, message);
    this.refresh(false);
    this.onchange();
  }

  async remove(one) {
    const isSure = await confirmed(`Delete ${one.name}?`, `This frees ${bytes(one.size_bytes)} on the server.`, "Delete");
    if (isSure) await this.order("/api/delete", one.name, "DELETE", `${one.name} was deleted`);
  }

  async pull(name) {
    if (pulls.has(name)) return;
    const running = { controller: new AbortController(), status: "starting", done: 0, total: 0 };
    pulls.set(name, running);
    this.draw();
    try {
      const response = await call("/api/pull", { method: "POST", body: { model: name }, signal: running.controller.signal });
      for await (const note of objects(response)) {
        if (note.error) throw new Error(note.error);
        Object.assign(running, { status: note.status, done: note.completed ?? running.done, total: note.total ?? running.total });
        this.draw();
      }
      toast(`${name} was downloaded`);
    } catch (error) {
      if (error.name === "AbortError") toast(`${name}: cancelled; the next download resumes it`);
      else toast(`${name}: ${reasonOf(error)}`, "error");
    }
    pulls.delete(name);
    this.refresh(false);
  }
}

// ── elements ─────────────────────────────────────────────────────────────────────────────────────────

function line(name, about, facts, tail) {
  return h("div", { class: "row", "data-model": name }, h("div", { class: "row-text" }, h("strong", {}, name), about ? h("div", {}, about) : null,
    h("div", { class: "muted small" }, facts.filter((fact) => fact && fact !== "–").join(" · "))), h("div", { class: "row-tail" }, tail.filter(Boolean)));
}

function badge(text, kind) {
  return h("span", { class: `badge ${kind}` }, text);
}

function stateKind(state) {
  return { loaded: "good", failed: "bad", unloaded: "" }[state] ?? "busy";
}

function fitBadge(fit) {
  if (!fit) return null;
  return badge(fit.fits ? "fits here" : "too large", fit.fits ? "good" : "bad");
}

function fitText(fit) {
  if (!fit) return "";
  const speed = fit.tokens_s ? `, about ${shortNumber(fit.tokens_s)} tokens/s` : "";
  return `needs ${fit.is_planned ? "" : "roughly "}${bytes(fit.needs_bytes)}${speed}`;
}

function progress({ status, done, total }) {
  const share = total ? Math.floor((100 * done) / total) : null;
  return h("div", { class: "progress" }, h("progress", share === null ? {} : { value: done, max: total }), h("span", { class: "muted small" }, share === null ? status : `${share} % of ${bytes(total)}`));
}

/** Replace rows and restore the focus of the button that had it. */
function keepFocus(holder, rows) {
  const active = document.activeElement;
  const model = holder.contains(active) ? active.closest("[data-model]")?.dataset.model : null;
  const action = active?.dataset?.action;
  replace(holder, rows);
  if (model) [...holder.querySelectorAll("[data-action]")].find((one) => one.dataset.action === action && one.closest("[data-model]").dataset.model === model)?.focus();
}
