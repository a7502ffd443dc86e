// The API reference, made from the server's /openapi.json: bodies, replies and errors of each route, and a form to try it.

import { call, getJson, storedKey } from "./api.js";
import { h, icon, pretty, replace } from "./dom.js";

const MAX_SHOWN = 100000;

function schemaText(schema) {
  if (!schema || !Object.keys(schema).length) return "any";
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" | ");
  const several = schema.anyOf || schema.oneOf;
  if (several) return several.map(schemaText).join(" | ");
  if (schema.type === "array") return `list of ${schemaText(schema.items)}`;
  const kind = Array.isArray(schema.type) ? schema.type.join(" | ") : schema.type || "any";
  const bounds = [schema.minimum !== undefined && `≥ ${schema.minimum}`, schema.maximum !== undefined && `≤ ${schema.maximum}`].filter(Boolean);
  return bounds.length ? `${kind} (${bounds.join(", ")})` : kind;
}

function fields(schema) {
  const properties = Object.entries(schema?.properties || {});
  if (!properties.length) return h("p", { class: "muted small" }, schemaText(schema));
  const required = new Set(schema.required || []);
  return h("div", { class: "table-box" }, h("table", {}, h("tbody", {}, properties.map(([name, one]) =>
    h("tr", {}, h("td", {}, h("code", {}, name), required.has(name) ? h("span", { class: "badge" }, "required") : null), h("td", {}, schemaText(one)), h("td", {}, one.description || ""))))));
}

function operation(method, path, one) {
  const bodies = Object.entries(one.requestBody?.content || {});
  const ok = one.responses["200"];
  const failures = Object.entries(one.responses).filter(([status]) => status !== "200");
  const answers = Object.entries(ok.content || {}).map(([kind, { schema }]) => [h("h4", {}, "Reply: ", h("code", {}, kind)), schema ? fields(schema) : null]);
  const details = h("details", { class: "operation", id: `${method}-${path}` },
    h("summary", {}, h("span", { class: `method ${method}` }, method.toUpperCase()), h("code", {}, path), h("span", { class: "muted" }, one.summary)));
  const content = () => h("div", { class: "operation-body" }, one.description ? h("p", {}, one.description) : null,
    bodies.map(([kind, { schema }]) => [h("h4", {}, "Body: ", h("code", {}, kind)), schema ? fields(schema) : null]), answers, ok.description && ok.description !== "Done." ? h("p", { class: "muted" }, ok.description) : null,
    h("h4", {}, "Errors"), h("ul", {}, failures.map(([status, { description }]) => h("li", {}, h("code", {}, status), " ", description))), tryForm(method, path, bodies));
  details.addEventListener("toggle", () => details.open && details.children.length === 1 && details.append(content()));
  return details;
}

/** Return a form for a request without a body or with a JSON body; none for file uploads. */
function tryForm(method, path, bodies) {
  const body = bodies.find(([kind]) => kind === "application/json")?.[1].schema;
  if (bodies.length && !body) return null;
  const example = body?.examples?.[0] ?? body?.example ?? {};
  const address = h("input", { type: "text", value: path, "aria-label": "Path" });
  const text = body ? h("textarea", { rows: 6, class: "code", "aria-label": "Body", value: JSON.stringify(example, null, 2) }) : null;
  const shown = h("pre", { class: "sample", hidden: true, tabindex: 0 });
  const form = h("form", { class: "try" }, h("h4", {}, "Try it"), address, text, h("div", {}, h("button", { class: "primary" }, icon("send"), "Send")), shown);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    shown.hidden = false;
    shown.textContent = "…";
    try {
      const response = await call(address.value, { method: method.toUpperCase(), body: text ? JSON.parse(text.value) : undefined });
      await showReply(response, shown);
    } catch (error) {
      shown.textContent = error.message;
    }
  });
  return form;
}

async function showReply(response, shown) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) { // show streams while they arrive
    const { done, value } = await reader.read();
    if (done) break;
    text += value;
    shown.textContent = text;
    if (text.length > MAX_SHOWN || !shown.isConnected) { reader.cancel(); break; }
  }
  shown.textContent = pretty(text);
}

async function show() {
  const holder = document.getElementById("docs");
  let document_;
  try {
    document_ = await getJson("/openapi.json");
  } catch (error) {
    replace(holder, h("h1", {}, "API reference"), h("p", { class: "problem" }, error.message));
    return;
  }
  const groups = new Map();
  for (const [path, methods] of Object.entries(document_.paths)) {
    for (const [method, one] of Object.entries(methods)) {
      const tag = one.tags[0];
      groups.set(tag, [...(groups.get(tag) || []), operation(method, path, one)]);
    }
  }
  const filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter routes", oninput: () => {
    for (const one of holder.querySelectorAll(".operation")) one.hidden = !one.querySelector("summary").textContent.toLowerCase().includes(filter.value.toLowerCase());
  } });
  replace(holder, h("header", { class: "page-head" }, h("h1", {}, "API reference"), h("a", { href: "/" }, "Open the chat")),
    h("p", { class: "muted" }, `${document_.info.title} ${document_.info.version}. OpenAPI description: `, h("a", { href: "/openapi.json" }, "/openapi.json"), storedKey() ? ". Your API key is sent with every request." : "."),
    filter, [...groups].map(([tag, operations]) => h("section", {}, h("h2", {}, tag), operations)));
}

show();
