// The load of the server, updated every second: the numbers of /metrics with charts of the last minutes, and the running
// requests.

import { call, events, order, reasonOf } from "./api.js";
import { confirmed, duration, h, iconButton, percent, replace, shortNumber } from "./dom.js";

const MAX_READINGS = 120; // one per second
const MIN_AXIS_READINGS = 30; // shortest time axis; it grows up to MAX_READINGS
const RETRY_MS = 3000;
const P = "tokenmill_";
const CARDS = [
  { name: "running", label: "Running", value: (now) => now.running, course: "running" },
  { name: "waiting", label: "Waiting", value: (now) => now.waiting, course: "waiting" },
  { name: "kv", label: "KV cache in use", value: (now) => now.kv, show: percent, course: "kv", top: 1 },
  { name: "out", label: "Generated tokens/s", value: (now) => now.out, course: "out" },
  { name: "in", label: "Prompt tokens/s", value: (now) => now.in, course: "in" },
  { name: "ttft", label: "Time to first token", value: (now) => now.ttft, show: duration, course: "ttft", note: (now) => spread(now, "time_to_first_token_seconds") },
  { name: "tpot", label: "Time per token", value: (now) => now.tpot, show: duration, course: "tpot", note: (now) => spread(now, "time_per_output_token_seconds") },
  { name: "hits", label: "Prefix cache hits", value: (now) => now.hits, show: percent, note: (now) => `${shortNumber(now.series[`${P}prefix_hits_total`])} of ${shortNumber(now.series[`${P}prefix_queries_total`])} prompt tokens` },
  { name: "drafts", label: "Accepted draft tokens", value: (now) => now.drafts, show: percent, note: (now) => `${shortNumber(now.series[`${P}accepted_draft_tokens_total`])} of ${shortNumber(now.series[`${P}draft_tokens_total`])}` },
  { name: "finished", label: "Requests finished", value: (now) => now.finished, note: (now) => outcomes(now.series[`${P}requests_total`]) },
];

export class LoadView {
  constructor() {
    this.past = [];
    this.cards = CARDS.map((card) => ({ ...card, ...cardElement(card) }));
    this.state = h("span", { class: "state-dot" });
    this.table = h("tbody");
    this.count = h("h2", {}, "Running requests");
    this.fleet = new FleetTable();
    const heads = ["Request", "Model", "State", "Age", "Prompt", "Generated", "Tokens/s", ""];
    this.figures = h("div", { class: "cards" }, this.cards.map((card) => card.element));
    this.element = h("section", { class: "page load", "aria-label": "Load" },
      h("header", { class: "page-head" }, h("h1", {}, "Load"), this.state),
      this.figures, this.fleet.element, this.count,
      h("div", { class: "table-box" }, h("table", { class: "requests" }, h("thead", {}, h("tr", {}, heads.map((text, at) => h("th", { class: at > 2 ? "right" : "" }, text)))), this.table)));
  }

  /** Receive the feed until `hide`: the server computes nothing for this view while it is not shown. */
  async show() {
    if (this.controller) return;
    const controller = (this.controller = new AbortController());
    while (!controller.signal.aborted) {
      try {
        const response = await call("/ui/events", { signal: controller.signal });
        for await (const data of events(response)) this.note(JSON.parse(data));
      } catch (error) {
        if (controller.signal.aborted) return;
        this.showState("unreachable", reasonOf(error));
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  hide() {
    this.controller?.abort();
    this.controller = null;
    this.past = [];
  }

  note(reading) {
    const now = derive(reading, this.past[this.past.length - 1]);
    this.past = [...this.past, now].slice(-MAX_READINGS);
    this.showState(reading.state, `Tokenmill ${reading.version}`);
    this.figures.hidden = !Object.keys(now.series).length; // only operators' keys see the numbers of the whole server
    for (const card of this.cards) {
      card.figure.textContent = (card.show || shortNumber)(card.value(now));
      if (card.note) card.small.textContent = card.note(now);
      if (card.course) draw(card.canvas, this.past.map((one) => one[card.course]), card.top);
    }
    this.fleet.note(reading, this.past[this.past.length - 2]);
    this.showRequests(reading);
  }

  showState(state, detail) {
    this.state.dataset.state = state;
    this.state.textContent = state;
    this.state.title = detail;
  }

  showRequests({ requests, num_requests: count }) {
    this.count.textContent = `Running requests (${count})`;
    replace(this.table, requests.map((one) => this.row(one)),
      requests.length ? null : h("tr", {}, h("td", { colspan: 8, class: "muted" }, "No requests are running.")));
  }

  row(one) {
    const answering = one.ttft_s === null ? 0 : one.age_s - one.ttft_s;
    const rate = answering > 0.2 ? one.generated_tokens / answering : null;
    const states = { preparing: "preparing", prompt: "queued or in prefill", answering: "generating" };
    return h("tr", { "data-id": one.id }, h("td", {}, h("code", { title: one.id }, one.request_id.slice(0, 18)), h("div", { class: "muted small" }, one.key ? `${one.path} by ${one.key.slice(0, 24)}` : one.path)), h("td", {}, one.model), h("td", {}, states[one.state]),
      h("td", { class: "right" }, duration(one.age_s)), h("td", { class: "right" }, shortNumber(one.prompt_tokens)), h("td", { class: "right" }, shortNumber(one.generated_tokens)),
      h("td", { class: "right" }, shortNumber(rate)), h("td", {}, iconButton("stop", "Abort this request", () => this.abort(one), { class: "icon-button danger" })));
  }

  async abort(one) {
    const isSure = await confirmed("Abort this request?", `${one.request_id}: its client gets an error with the code “aborted”.`, "Abort");
    if (isSure) await order("/ui/abort", "POST", { id: one.id }, "Aborted");
  }
}

/** A table of the replicas, if there are several: their location, load, and the reasons why requests were assigned to
 * them. Only the rows are replaced, so that the box around them keeps its scroll position. */
class FleetTable {
  constructor() {
    const heads = ["Replica", "State", "Requests", "Busy", "KV cache", "Prefix hits", "Assigned by", "Restarts"];
    this.title = h("h2", {}, "Replicas");
    this.rows = h("tbody");
    this.element = h("div", { class: "fleet", hidden: true }, this.title,
      h("div", { class: "table-box" }, h("table", { class: "replicas" }, h("thead", {}, h("tr", {}, heads.map((text, at) => h("th", { class: at > 1 && at !== 6 ? "right" : "" }, text)))), this.rows)));
  }

  note({ replicas, time }, before) {
    this.element.hidden = !replicas.length;
    const ready = replicas.filter((one) => one.state === "ready").length;
    this.title.textContent = `Replicas (${ready} of ${replicas.length} ready)`;
    replace(this.rows, ...replicas.map((one) => replicaRow(one, busyShare(one, time, before))));
  }
}

function busyShare(one, time, before) {
  const last = before?.replicas.find((other) => other.model === one.model && other.replica === one.replica);
  return last ? Math.min(1, Math.max(0, (one.busy_s - last.busy_s) / (time - before.time))) : NaN;
}

function replicaRow(one, busy) {
  const details = [one.model, one.role === "any" ? "" : one.role, one.place].filter(Boolean).join(", ");
  return h("tr", { "data-replica": one.replica },
    h("td", {}, `${one.replica}`, h("div", { class: "muted small" }, details)),
    h("td", {}, h("span", { class: "state-dot", "data-state": one.is_drained ? "draining" : one.state, title: one.detail }, one.is_drained ? "drained" : one.state)),
    h("td", { class: "right" }, shortNumber(one.requests)), h("td", { class: "right" }, percent(busy)),
    h("td", { class: "right" }, percent(one.kv_blocks_total ? one.kv_blocks_used / one.kv_blocks_total : NaN)),
    h("td", { class: "right" }, percent(one.prefix_query_tokens ? one.prefix_hit_tokens / one.prefix_query_tokens : NaN)),
    h("td", {}, Object.entries(one.num_placed).map(([why, count]) => `${why} ${shortNumber(count)}`).join(", ")), h("td", { class: "right" }, shortNumber(one.restarts)));
}

function cardElement({ name, label, course }) {
  const figure = h("div", { class: "figure" }, "–");
  const small = h("div", { class: "muted small" });
  const canvas = course ? h("canvas", { class: "course", "aria-hidden": "true" }) : null;
  return { figure, small, canvas, element: h("div", { class: "card", "data-card": name }, h("div", { class: "label" }, label), figure, small, canvas) };
}

// ── derived values ───────────────────────────────────────────────────────────────────────────────────

/** Return the values to show, from a reading and the previous one. */
function derive(reading, before) {
  const { series } = reading;
  const value = (name) => series[P + name] ?? 0;
  const rise = (name) => value(name) - (before ? (before.series[P + name] ?? 0) : value(name));
  const seconds = before ? reading.time - before.time : 1;
  // The counters have only the tokens of finished requests; those of running requests are added here.
  const made = value("generation_tokens_total") + reading.num_generated;
  const read = value("prompt_tokens_total") + reading.num_read;
  const mean = (name) => (rise(`${name}_count`) > 0 ? rise(`${name}_sum`) / rise(`${name}_count`) : null);
  const share = (part, whole) => (whole > 0 ? part / whole : NaN);
  return {
    series, made, read, time: reading.time, replicas: reading.replicas,
    running: value("requests_running"), waiting: value("requests_waiting"), kv: value("kv_usage_ratio"),
    out: before ? Math.max(0, made - before.made) / seconds : 0,
    in: before ? Math.max(0, read - before.read) / seconds : 0,
    ttft: mean("time_to_first_token_seconds") ?? before?.ttft ?? overall(series, "time_to_first_token_seconds"),
    tpot: mean("time_per_output_token_seconds") ?? before?.tpot ?? overall(series, "time_per_output_token_seconds"),
    hits: share(value("prefix_hits_total"), value("prefix_queries_total")),
    drafts: share(value("accepted_draft_tokens_total"), value("draft_tokens_total")),
    finished: Object.values(series[`${P}requests_total`] || {}).reduce((sum, one) => sum + one, 0),
  };
}

function overall(series, name) {
  const count = series[`${P}${name}_count`];
  return count ? series[`${P}${name}_sum`] / count : NaN;
}

function outcomes(counts) {
  const shown = Object.entries(counts || {}).filter(([, count]) => count);
  return shown.map(([name, count]) => `${shortNumber(count)} ${name}`).join(", ");
}

/** Return the median and the 95th percentile of a histogram, as the upper bounds of their buckets. */
function spread({ series }, name) {
  const buckets = Object.entries(series[`${P}${name}_bucket`] || {}).map(([bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), count]).sort((a, b) => a[0] - b[0]);
  const total = buckets.length ? buckets[buckets.length - 1][1] : 0;
  if (!total) return "no requests yet";
  const under = (share) => buckets.find(([, count]) => count >= share * total)[0];
  const shown = (bound) => (bound === Infinity ? "more" : `≤ ${duration(bound)}`);
  return `median ${shown(under(0.5))}, p95 ${shown(under(0.95))}`;
}

// ── charts ───────────────────────────────────────────────────────────────────────────────────────────

function draw(canvas, values, fixedTop) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width) return;
  if (canvas.width !== Math.round(width * ratio)) [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  const top = fixedTop || Math.max(...values.filter((one) => !Number.isNaN(one)), 1e-9) * 1.1;
  const shown = Math.max(MIN_AXIS_READINGS, values.length);
  const x = (at) => width - ((values.length - 1 - at) * width) / (shown - 1);
  const y = (value) => height - 2 - (value / top) * (height - 4);
  const points = values.map((value, at) => [x(at), value]).filter(([, value]) => !Number.isNaN(value)).map(([at, value]) => [at, y(value)]);
  if (!points.length) return;
  const colour = getComputedStyle(canvas).color;
  context.beginPath();
  points.forEach(([at, height_], number) => (number ? context.lineTo(at, height_) : context.moveTo(at, height_)));
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.stroke();
  context.lineTo(points[points.length - 1][0], height);
  context.lineTo(points[0][0], height);
  context.globalAlpha = 0.12;
  context.fillStyle = colour;
  context.fill();
  context.globalAlpha = 1;
}
