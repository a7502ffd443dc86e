// A conversation is a tree: each message has a parent, so an edited question or a regenerated answer is another branch.
// `chosen` maps a message to the child that is shown; the path from the root along these children is sent to the model.
//
//   root ── question ─┬─ answer
//                     └─ answer (again) ── question ─┬─ …
//                                                    └─ question (edited) ── …

import { newId } from "./dom.js";

const ROOT = "root";
export const DEFAULTS = {
  system: "", temperature: 0.7, topP: null, maxTokens: null, seed: null, effort: "", schema: "", tools: "", tokens: false,
};

export function newConversation(model, settings) {
  const now = Date.now();
  return { id: newId(), title: "", model, created: now, updated: now, nodes: {}, chosen: {}, settings: { ...DEFAULTS, ...settings } };
}

export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent: parent || ROOT, created: Date.now(), content: "", ...fields };
  conversation.nodes[node.id] = node;
  conversation.chosen[node.parent] = node.id;
  conversation.updated = node.created;
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.content);
  return node;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 57)}…` : line || "Picture";
}

export function children(conversation, parent) {
  return Object.values(conversation.nodes).filter((node) => node.parent === (parent || ROOT));
}

export function siblings(conversation, node) {
  return children(conversation, node.parent);
}

export function choose(conversation, node) {
  conversation.chosen[node.parent] = node.id;
}

export function path(conversation) {
  const byParent = new Map();
  for (const node of Object.values(conversation.nodes)) byParent.set(node.parent, [...(byParent.get(node.parent) || []), node]);
  const found = [];
  let at = ROOT;
  for (;;) {
    const below = byParent.get(at);
    if (!below) return found;
    const next = below.find((node) => node.id === conversation.chosen[at]) || below[below.length - 1];
    found.push(next);
    at = next.id;
  }
}

export function pathTo(conversation, id) {
  const found = [];
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) found.unshift(node);
  return found;
}

// ── requests ─────────────────────────────────────────────────────────────────────────────────────────

export function requestBody(conversation, nodes) {
  const { settings } = conversation;
  const messages = nodes.map(asMessage);
  if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = { model: conversation.model, messages, stream: true, stream_options: { include_usage: true } };
  const optional = {
    temperature: settings.temperature, top_p: settings.topP, max_tokens: settings.maxTokens, seed: settings.seed,
    reasoning_effort: settings.effort || null,
  };
  for (const [name, value] of Object.entries(optional)) if (value !== null && value !== undefined) body[name] = value;
  if (settings.schema.trim()) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
  const tools = toolsOf(settings.tools);
  if (tools.length) body.tools = tools;
  if (settings.tokens) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

export function toolsOf(text) {
  if (!text.trim()) return [];
  const value = JSON.parse(text);
  return (Array.isArray(value) ? value : [value]).map((one) => (one.type ? one : { type: "function", function: one }));
}

function asMessage(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  if (node.role === "assistant") {
    const message = { role: "assistant", content: node.content };
    if (node.thinking) message.reasoning_content = node.thinking;
    if (node.calls?.length) message.tool_calls = node.calls.map(asCall);
    return message;
  }
  if (!node.images?.length) return { role: "user", content: node.content };
  const pictures = node.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...(node.content ? [{ type: "text", text: node.content }] : []), ...pictures] };
}

function asCall(call) {
  return { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments || "{}" } };
}

// ── import ───────────────────────────────────────────────────────────────────────────────────────────

const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

export function exported(conversations) {
  return JSON.stringify({ format: "tokenmill-conversations", version: 1, conversations }, null, 1);
}

/** Return the conversations of an exported file. They are copied field by field, so unknown fields are dropped. */
export function imported(source) {
  const data = JSON.parse(source);
  if (data?.format !== "tokenmill-conversations" || !Array.isArray(data.conversations)) throw new Error("it is not an export of Tokenmill conversations.");
  return data.conversations.map(readConversation);
}

function readConversation(source) {
  const conversation = newConversation(text(source.model), {});
  const settings = source.settings || {};
  for (const [name, standard] of Object.entries(DEFAULTS)) {
    const value = settings[name];
    if (typeof standard === "string") conversation.settings[name] = text(value);
    else if (typeof standard === "boolean") conversation.settings[name] = value === true;
    else conversation.settings[name] = number(value);
  }
  const ids = new Map(); // id in the file -> new id
  for (const node of Object.values(source.nodes || {})) {
    if (!["user", "assistant", "tool"].includes(node?.role)) continue;
    const copy = addNode(conversation, ids.get(node.parent), readNode(node)); // parents precede their children
    ids.set(node.id, copy.id);
  }
  for (const [parent, child] of Object.entries(source.chosen || {})) {
    if (ids.has(child)) conversation.chosen[ids.get(parent) || ROOT] = ids.get(child);
  }
  const { title, created, updated } = conversation;
  return Object.assign(conversation, { title: text(source.title) || title, created: number(source.created) || created, updated: number(source.updated) || updated });
}

function readNode(node) {
  const copy = { role: node.role, content: text(node.content), created: number(node.created) || Date.now() };
  if (node.role === "tool") copy.callId = text(node.callId);
  if (node.role === "user") copy.images = (node.images || []).filter((url) => /^data:image\/(png|jpeg|webp|gif);base64,/.test(url));
  if (node.role !== "assistant") return copy;
  const calls = (node.calls || []).map((call) => ({ id: text(call.id), name: text(call.name), arguments: text(call.arguments) }));
  const stats = Object.fromEntries(Object.entries(node.stats || {}).filter(([, value]) => number(value) !== null));
  const tokens = (node.tokens || []).map(([shown, logprob, top]) => [text(shown), number(logprob), (top || []).map(([other, score]) => [text(other), number(score)])]);
  return Object.assign(copy, { thinking: text(node.thinking), model: text(node.model), finish: text(node.finish), error: text(node.error), calls, stats, tokens });
}
