// The page: the list of conversations beside one of three views, chosen by the URL (#/chat/ID, #/models, #/load). Also
// the theme and the keyboard shortcuts.

import { askKey } from "./api.js";
import { ChatView } from "./chat.js";
import { dialog, h, icon, iconButton, replace } from "./dom.js";
import { LoadView } from "./load.js";
import { ModelsView } from "./models.js";

const THEMES = ["auto", "light", "dark"];
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" };
const VIEWS = { chat: "Chat", models: "Models", load: "Load" };
const SHORTCUTS = [
  ["Enter", "send; Shift+Enter inserts a line break"],
  ["Esc", "stop generating, or close a panel"],
  ["↑ in an empty box", "edit the last message"],
  ["Ctrl or ⌘ + K", "search conversations"],
  ["Alt + N", "new chat"],
  ["Alt + R", "regenerate the last answer"],
  ["Alt + S", "parameters"],
  ["Alt + 1, 2, 3", "chat, models, load"],
  ["Alt + T", "theme: light, dark or the system's"],
  ["?", "show this list"],
];

const conversations = h("div", { class: "sidebar-chats" });
const chat = new ChatView(conversations);
const models = new ModelsView(() => chat.loadModels());
const load = new LoadView();
const views = { chat, models, load };
const main = h("main", { id: "main" });
const themeButton = iconButton("auto", "Theme", nextTheme);
const links = Object.entries(VIEWS).map(([name, label]) => h("a", { href: `#/${name}`, "data-view": name }, icon(name), label));
const sidebar = h("div", { class: "sidebar" },
  h("div", { class: "brand" }, h("img", { src: "/ui/icon.svg", alt: "" }), h("span", {}, "Tokenmill"), iconButton("close", "Close the menu", () => openMenu(false), { class: "icon-button menu-close" })),
  h("nav", { class: "views", "aria-label": "Views" }, links), conversations,
  h("div", { class: "sidebar-foot" }, themeButton, iconButton("key", "API key", () => askKey("The API key for this server. It is kept until this tab is closed.")),
    iconButton("help", "Shortcuts (?)", showShortcuts), h("a", { class: "icon-button", href: "/docs", title: "API reference of this server", "aria-label": "API reference of this server" }, icon("book"))));
const menuButton = iconButton("menu", "Menu", () => openMenu(true), { class: "icon-button menu-button" });
const veil = h("div", { class: "veil", onclick: () => openMenu(false) });

function openMenu(isOpen) {
  document.body.classList.toggle("menu-open", isOpen);
}

// ── views ────────────────────────────────────────────────────────────────────────────────────────────

let shown = null;

async function route() {
  const [, name = "chat", id] = location.hash.split("/");
  const next = views[name] ? name : "chat";
  openMenu(false);
  if (shown !== next) {
    views[shown]?.hide?.();
    shown = next;
    replace(main, menuButton, views[next].element);
    views[next].show?.();
    links.forEach((link) => (link.dataset.view === next ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current")));
    document.title = next === "chat" ? "Tokenmill" : `${VIEWS[next]} – Tokenmill`;
  }
  if (next === "chat") await chat.open(id || null);
}

// ── theme ────────────────────────────────────────────────────────────────────────────────────────────

function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  themeButton.title = `Theme: ${theme === "auto" ? "system" : theme} (Alt+T)`;
  replace(themeButton, icon(THEME_ICONS[theme]));
}

function currentTheme() {
  const kept = localStorage.getItem("tokenmill-theme");
  return THEMES.includes(kept) ? kept : "auto";
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(currentTheme()) + 1) % THEMES.length];
  localStorage.setItem("tokenmill-theme", theme);
  applyTheme(theme);
}

// ── shortcuts ────────────────────────────────────────────────────────────────────────────────────────

function showShortcuts() {
  dialog("Shortcuts", h("dl", { class: "shortcuts" }, SHORTCUTS.map(([keys, what]) => h("div", {}, h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)))), []);
}

function goTo(name) {
  location.hash = name === "chat" && chat.current && Object.keys(chat.current.nodes).length ? `#/chat/${chat.current.id}` : `#/${name}`;
}

const BY_CODE = {
  KeyN: () => chat.startNew(),
  KeyR: () => shown === "chat" && chat.regenerateLast(),
  KeyS: () => shown === "chat" && chat.toggleSettings(),
  KeyT: nextTheme,
  Digit1: () => goTo("chat"),
  Digit2: () => goTo("models"),
  Digit3: () => goTo("load"),
};

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const isTyping = ["INPUT", "TEXTAREA", "SELECT"].includes(event.target.tagName);
  if ((event.ctrlKey || event.metaKey) && event.code === "KeyK") { event.preventDefault(); openMenu(true); chat.search.focus(); }
  else if (event.altKey && !event.ctrlKey && BY_CODE[event.code]) { event.preventDefault(); BY_CODE[event.code](); }
  else if (event.key === "Escape") {
    if (document.body.classList.contains("menu-open")) openMenu(false);
    else if (shown === "chat" && chat.run()) chat.stop();
    else if (shown === "chat" && !chat.settings.element.hidden) chat.toggleSettings();
  } else if (event.key === "?" && !isTyping) showShortcuts();
});

document.addEventListener("visibilitychange", () => (document.hidden ? views[shown]?.hide?.() : views[shown]?.show?.()));
links[0].addEventListener("click", (event) => { event.preventDefault(); goTo("chat"); openMenu(false); });
applyTheme(currentTheme());
document.getElementById("app").append(sidebar, veil, main);
window.addEventListener("hashchange", route);
chat.loadModels().then(route);
