// Requests to this page's server. An API key, if the server needs one, is entered once and kept for the browser tab.

import { dialog, h, toast } from "./dom.js";

const KEY_NAME = "tokenmill-key";
let asking = null;

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY_NAME) || "";
}

export function askKey(reason) {
  asking ||= new Promise((resolve) => {
    const input = h("input", { type: "password", name: "key", autocomplete: "off", "aria-label": "API key", value: storedKey() });
    const form = h("form", {}, h("p", {}, reason), input);
    const keep = () => (input.value ? sessionStorage.setItem(KEY_NAME, input.value) : sessionStorage.removeItem(KEY_NAME));
    let isEntered = false;
    const box = dialog("API key", form, [{ label: "Use this key", kind: "primary", action: () => { keep(); isEntered = true; } }], () => {
      asking = null;
      resolve(isEntered);
    });
    form.addEventListener("submit", (event) => { event.preventDefault(); keep(); isEntered = true; box.close(); });
    input.focus();
  });
  return asking;
}

/** What went wrong, for people: browsers say "network error" or "Failed to fetch" when the server does not answer. */
export function reasonOf(error) {
  return error instanceof TypeError ? "The connection to the server was lost." : error.message || String(error);
}

export async function call(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const headers = storedKey() ? { authorization: `Bearer ${storedKey()}` } : {};
    if (body !== undefined) headers["content-type"] = "application/json";
    const response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
    if (response.status === 401 && (await askKey("This server requires an API key. It is kept until this tab is closed."))) continue;
    if (!response.ok) throw await errorOf(response);
    return response;
  }
}

/** Send a request and show its outcome to the user: `message` if it succeeds, or the error. */
export async function order(path, method, body, message = "") {
  try {
    await call(path, { method, body });
    if (message) toast(message);
  } catch (error) {
    toast(reasonOf(error), "error");
  }
}

async function errorOf(response) {
  let message = `${response.status} ${response.statusText}`;
  let code;
  try {
    const error = (await response.json()).error;
    message = typeof error === "string" ? error : error.message;
    code = error.code;
  } catch { /* not JSON: use the status line */ }
  return new ApiError(message, response.status, code);
}

export async function getJson(path, options) {
  return (await call(path, options)).json();
}

export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}

export async function* events(response) {
  for await (const line of lines(response)) if (line.startsWith("data: ")) yield line.slice(6);
}

export async function* objects(response) {
  for await (const line of lines(response)) if (line) yield JSON.parse(line);
}

// The capabilities of a model from /api/show, requested once per model.
const capabilitiesByModel = new Map();
export function capabilities(model) {
  if (!capabilitiesByModel.has(model)) {
    const loading = getJson("/api/show", { method: "POST", body: { model } }).then((card) => card.capabilities);
    capabilitiesByModel.set(model, loading.catch(() => { capabilitiesByModel.delete(model); return []; }));
  }
  return capabilitiesByModel.get(model);
}
