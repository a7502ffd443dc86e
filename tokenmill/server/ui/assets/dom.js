// Helpers for elements, icons and numbers. Text is added to the page only as text nodes: no code of the page parses HTML.

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  chat: "M4 5h16v11H9l-5 4z",
  models: "M4 7l8-4 8 4-8 4zM4 12l8 4 8-4M4 17l8 4 8-4",
  load: "M3 17l5-6 4 3 6-8 3 3",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V6M6 11l6-6 6 6",
  stop: "M6.5 6.5h11v11h-11z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  edit: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  again: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  close: "M6 6l12 12M18 6L6 18",
  menu: "M4 7h16M4 12h16M4 17h16",
  tune: "M4 8h9M17 8h3M4 16h3M11 16h9M15 6v4M9 14v4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 2-2 5 5M15 9.5h.01",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5L19 19M5 19l1.5-1.5M17.5 6.5L19 5",
  moon: "M19 14A8 8 0 0 1 10 5a8 8 0 1 0 9 9z",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  key: "M8 8a4 4 0 1 0 0 8 4 4 0 0 0 4-3h5v3h3v-3h1v-2h-9a4 4 0 0 0-4-3zM8 12h.01",
  help: "M9 9a3 3 0 1 1 4 3c-1 .5-1 1-1 2M12 18h.01",
  code: "M8 7l-5 5 5 5M16 7l5 5-5 5",
  down: "M12 4v12M6 11l6 6 6-6M5 20h14",
  up: "M12 20V8M6 13l6-6 6 6M5 4h14",
  search: "M11 5a6 6 0 1 0 0 12 6 6 0 0 0 0-12zM20 20l-4.5-4.5",
  tool: "M14 6a4 4 0 0 0 5 5l-8 8-4-4 8-8zM5 19h.01",
  tokens: "M4 6h5v5H4zM11 6h9v5h-9zM4 13h9v5H4zM15 13h5v5h-5z",
  book: "M5 4h11a3 3 0 0 1 3 3v13H8a3 3 0 0 1-3-3zM5 17a3 3 0 0 1 3-3h11",
};

export function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "value") element.value = value;
    else if (name === "checked") element.checked = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...present(children));
  return element;
}

function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.setAttribute("class", "icon");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function iconButton(name, label, onclick, extra = {}) {
  return h("button", { type: "button", class: "icon-button", title: label, "aria-label": label, onclick, ...extra }, icon(name));
}

/** A button with a label, and an icon before it if `iconName` is given. */
export function button(label, onclick, kind = "", iconName = null) {
  return h("button", { type: "button", class: kind, onclick, "data-action": label }, iconName ? icon(iconName) : null, label);
}

export function replace(element, ...children) {
  element.replaceChildren(...present(children));
}

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12)); // randomUUID exists only in secure contexts (https or localhost)
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// ── messages to the user ─────────────────────────────────────────────────────────────────────────────

export function toast(text, kind = "note") {
  let holder = document.querySelector(".toasts");
  if (!holder) document.body.append((holder = h("div", { class: "toasts", role: "status", "aria-live": "polite" })));
  const one = h("div", { class: `toast ${kind}` }, text);
  holder.append(one);
  setTimeout(() => one.remove(), kind === "error" ? 8000 : 4000);
}

export function dialog(title, content, buttons, onclose) {
  const box = h("dialog", { class: "dialog", "aria-label": title });
  const close = () => box.close();
  const shown = buttons.map(({ label, kind, action }) => button(label, async () => (await action?.()) !== false && close(), kind));
  box.append(h("header", {}, h("h2", {}, title), iconButton("close", "Close", close)), content, h("footer", {}, shown));
  box.addEventListener("close", () => { box.remove(); onclose?.(); });
  box.addEventListener("click", (event) => event.target === box && close());
  document.body.append(box);
  box.showModal();
  return box;
}

export function confirmed(title, text, label) {
  return new Promise((resolve) => {
    let isConfirmed = false;
    dialog(title, h("p", {}, text), [
      { label: "Cancel" },
      { label, kind: "danger", action: () => { isConfirmed = true; } },
    ], () => resolve(isConfirmed));
  });
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "off-screen", value: text }); // the clipboard API exists only in secure contexts
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast("Copied");
}

/** Return JSON with line breaks and indentation; any other text unchanged. */
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function saveFile(name, text) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// ── numbers ──────────────────────────────────────────────────────────────────────────────────────────

export function shortNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (Math.abs(value) >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return Number.isInteger(value) || Math.abs(value) >= 100 ? `${Math.round(value)}` : value.toFixed(1);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function bytes(count) {
  if (!count) return "–";
  const unit = count >= 1e9 ? ["GB", 1e9] : count >= 1e6 ? ["MB", 1e6] : ["kB", 1e3];
  return `${(count / unit[1]).toFixed(count >= 1e10 || unit[1] < 1e9 ? 0 : 1)} ${unit[0]}`;
}

export function percent(share) {
  return share === null || Number.isNaN(share) ? "–" : `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}
