// Calls to the server that this page came from. A key, where the server wants one, is typed once and kept for the tab.

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
    let given = false;
    const box = dialog("API key", form, [{ label: "Use this key", kind: "primary", action: () => { keep(); given = true; } }], () => {
      asking = null;
      resolve(given);
    });
    form.addEventListener("submit", (event) => { event.preventDefault(); keep(); given = true; box.close(); });
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
    if (response.status === 401 && (await askKey("This server asks for an API key. It is kept until this tab is closed."))) continue;
    if (!response.ok) throw await errorOf(response);
    return response;
  }
}

/** A call whose outcome is told to the user: what is said if it works, or why it does not. */
export async function order(path, method, body, said = "") {
  try {
    await call(path, { method, body });
    if (said) toast(said);
  } catch (error) {
    toast(reasonOf(error), "error");
  }
}

async function errorOf(response) {
  let message = `${response.status} ${response.statusText}`;
  let code;
  try {
    const found = (await response.json()).error;
    message = typeof found === "string" ? found : found.message;
    code = found.code;
  } catch { /* not JSON: the status line has to do */ }
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

// What a model can do, as /api/show says; asked once a model.
const cards = new Map();
export function capabilities(model) {
  if (!cards.has(model)) {
    const asked = getJson("/api/show", { method: "POST", body: { model } }).then((card) => card.capabilities);
    cards.set(model, asked.catch(() => { cards.delete(model); return []; }));
  }
  return cards.get(model);
}
