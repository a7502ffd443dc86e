// The panel beside a conversation: system prompt, sampling, thinking, JSON schema, tools.

import { capabilities } from "./api.js";
import { toolsOf } from "./conversation.js";
import { h } from "./dom.js";

const EFFORTS = ["", "none", "low", "medium", "high"];
const EXAMPLE_TOOL = `[{"name": "weather", "description": "The weather in a city",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]`;
const EXAMPLE_SCHEMA = `{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}`;
const FIELDS = [
  { name: "system", label: "System prompt", rows: 4, hint: "Instructions for the model" },
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, hint: "0: always the most likely token" },
  { name: "topP", label: "Top-p", min: 0, max: 1, step: 0.05, hint: "the model's default" },
  { name: "maxTokens", label: "Max tokens", min: 1, step: 1, whole: true, hint: "no limit" },
  { name: "seed", label: "Seed", min: 0, step: 1, whole: true, hint: "random" },
  { name: "effort", label: "Thinking", options: EFFORTS, needs: "thinking" },
  { name: "tokens", label: "Record token probabilities", flag: true },
  { name: "schema", label: "JSON schema of the answer", rows: 4, hint: EXAMPLE_SCHEMA, check: (text) => JSON.parse(text) },
  { name: "tools", label: "Tools", rows: 6, hint: EXAMPLE_TOOL, check: toolsOf, needs: "tools" },
];

export class SettingsPanel {
  constructor(onchange) {
    this.onchange = onchange;
    this.element = h("aside", { class: "settings", "aria-label": "Parameters", hidden: true });
  }

  /** Show the settings of a conversation, with a note beside each field that its model does not support. */
  async show(conversation) {
    this.element.replaceChildren(h("h2", {}, "Parameters"), ...FIELDS.map((field) => this.field(field, conversation)));
    const can = await capabilities(conversation.model);
    for (const note of this.element.querySelectorAll("[data-needs]")) {
      note.hidden = can.includes(note.dataset.needs);
    }
  }

  field(field, conversation) {
    const { settings } = conversation;
    const problem = h("span", { class: "field-problem", role: "alert" });
    const set = (value) => { settings[field.name] = value; this.onchange(conversation); };
    const input = this.input(field, settings, set, problem);
    const needs = field.needs ? h("span", { class: "muted small", "data-needs": field.needs, hidden: true }, field.needs === "tools" ? "This model's template does not support tools." : "This model does not support thinking.") : null;
    return h("label", { class: field.flag ? "field flag" : "field" }, field.flag ? [input, h("span", {}, field.label)] : [h("span", {}, field.label), input], needs, problem);
  }

  input(field, settings, set, problem) {
    const value = settings[field.name];
    if (field.flag) return h("input", { type: "checkbox", name: field.name, checked: value, onchange: (event) => set(event.target.checked) });
    if (field.options) {
      const options = field.options.map((one) => h("option", { value: one, selected: one === value }, one || "the model's default"));
      return h("select", { name: field.name, onchange: (event) => set(event.target.value) }, options);
    }
    if (field.rows) {
      return h("textarea", { name: field.name, rows: field.rows, value, placeholder: field.hint, spellcheck: field.check ? "false" : "true", class: field.check ? "code" : "",
        oninput: (event) => { problem.textContent = checked(field, event.target.value); set(event.target.value); } });
    }
    return h("input", { type: "number", name: field.name, min: field.min, max: field.max, step: field.step, value: value ?? "", placeholder: field.hint,
      oninput: (event) => {
        const number = event.target.value === "" ? null : Number(event.target.value);
        const isWrong = number !== null && (number < (field.min ?? -Infinity) || number > (field.max ?? Infinity) || (field.whole && !Number.isInteger(number)));
        problem.textContent = isWrong ? rangeText(field) : "";
        if (!isWrong) set(number);
      } });
  }
}

function rangeText({ min, max, whole }) {
  return `must be ${whole ? "a whole number" : "a number"} ${max === undefined ? `of at least ${min}` : `between ${min} and ${max}`}`;
}

/** Return the problem with the value of a text field; "" if it is valid. */
function checked(field, text) {
  if (!field.check || !text.trim()) return "";
  try {
    field.check(text);
    return "";
  } catch (error) {
    return error.message;
  }
}

export function wrongSettings(settings) {
  for (const field of FIELDS) {
    const problem = checked(field, settings[field.name] || "");
    if (problem) return `${field.label}: ${problem}`;
  }
  return "";
}
