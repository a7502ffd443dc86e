// Renders Markdown as DOM nodes: paragraphs, headings, lists, quotes, tables, rules, fenced code with a copy button,
// emphasis, code and links. Anything else is shown as plain text. Nothing is parsed as HTML, links lead only to http, https
// and mail, and images are shown as links, because the page must not fetch URLs that a model generates.

import { copyText, h, iconButton } from "./dom.js";

const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(\s+#+)?\s*$/;
const TABLE_LINE = /^ *\|?( *:?-+:? *\|)+( *:?-+:? *)?$/;

/** Render a text that may still grow. The nodes of blocks whose source did not change are kept. */
export function renderMarkdown(element, text) {
  const blocks = splitBlocks(text.replace(/\r\n?/g, "\n").split("\n"));
  const before = element.markdownBlocks || [];
  let same = 0;
  while (same < blocks.length && same < before.length && before[same] === blocks[same].source) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) element.append(renderBlock(block, 0));
  element.markdownBlocks = blocks.map((block) => block.source);
}

// ── blocks ───────────────────────────────────────────────────────────────────────────────────────────

function splitBlocks(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at++; continue; }
    const [kind, end, extra] = blockAt(lines, at);
    const part = lines.slice(at, end);
    blocks.push({ kind, lines: part, source: `${kind}\n${part.join("\n")}`, ...extra });
    at = end;
  }
  return blocks;
}

function blockAt(lines, at) {
  const line = lines[at];
  const fence = line.match(FENCE);
  if (fence) return fenced(lines, at, fence);
  if (HEADING.test(line)) return ["heading", at + 1];
  if (RULE.test(line)) return ["rule", at + 1];
  if (/^ {0,3}>/.test(line)) return ["quote", while_(lines, at, (one) => one.trim() && (/^ {0,3}>/.test(one) || !startsBlock(one)))];
  if (ITEM.test(line)) return ["list", listEnd(lines, at)];
  if (line.includes("|") && TABLE_LINE.test(lines[at + 1] || "")) return ["table", while_(lines, at, (one) => one.includes("|"))];
  return ["paragraph", while_(lines, at, (one, number) => one.trim() && (number === at || !startsBlock(one)))];
}

function fenced(lines, at, fence) {
  const closing = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},} *$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end++;
  return ["code", Math.min(end + 1, lines.length), { language: fence[2], isClosed: end < lines.length }];
}

function while_(lines, at, holds) {
  let end = at;
  while (end < lines.length && holds(lines[end], end)) end++;
  return Math.max(end, at + 1);
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || /^ {0,3}>/.test(line) || ITEM.test(line);
}

const isOrdered = (item) => /\d/.test(item[2]);

function listEnd(lines, at) {
  const first = lines[at].match(ITEM);
  const indent = first[1].length;
  let end = at + 1;
  for (; end < lines.length; end++) {
    const line = lines[end];
    if (!line.trim()) {
      const next = lines[end + 1] || "";
      if (!next.trim() || !(ITEM.test(next) || /^ {2,}/.test(next))) break;
      continue;
    }
    const isIndented = line.match(/^ */)[0].length > indent;
    const item = line.match(ITEM);
    if (item && !isIndented && isOrdered(item) !== isOrdered(first)) break; // the start of a list of the other kind
    if (!isIndented && !ITEM.test(line) && (startsBlock(line) || !lines[end - 1].trim())) break;
    if (RULE.test(line) && !isIndented) break;
  }
  return end;
}

function renderBlock(block, depth) {
  const inner = (lines) => (depth < MAX_DEPTH ? splitBlocks(lines).map((one) => renderBlock(one, depth + 1)) : [lines.join("\n")]);
  switch (block.kind) {
    case "heading": {
      const [, marks, text] = block.lines[0].match(HEADING);
      return h(`h${Math.min(marks.length + 2, 6)}`, {}, inline(text)); // levels 1 and 2 are the page's own headings
    }
    case "rule": return h("hr");
    case "code": return codeBlock(block);
    case "quote": return h("blockquote", {}, inner(block.lines.map((line) => line.replace(/^ {0,3}> ?/, ""))));
    case "list": return list(block.lines, inner);
    case "table": return table(block.lines);
    default: return h("p", {}, inline(block.lines.map((line) => line.trimStart()).join("\n")));
  }
}

function codeBlock(block) {
  const code = block.lines.slice(1, block.isClosed ? -1 : undefined).join("\n");
  const bar = h("div", { class: "code-bar" }, h("span", {}, block.language || "code"), iconButton("copy", "Copy code", () => copyText(code)));
  return h("div", { class: "code-block" }, bar, h("pre", { tabindex: 0 }, h("code", {}, highlighted(code))));
}

function list(lines, inner) {
  const items = [];
  const first = lines[0].match(ITEM);
  for (const line of lines) {
    const item = line.match(ITEM);
    if (item && item[1].length <= first[1].length + 1) items.push({ width: item[0].length, lines: [line.slice(item[0].length)] });
    else items[items.length - 1].lines.push(line.slice(Math.min(items[items.length - 1].width, line.match(/^ */)[0].length)));
  }
  return h(isOrdered(first) ? "ol" : "ul", isOrdered(first) ? { start: parseInt(first[2], 10) } : {}, items.map((item) => h("li", {}, listItem(item.lines, inner))));
}

function listItem(lines, inner) {
  const made = inner(lines);
  const task = lines[0].match(/^\[([ xX])\] /);
  const single = made.filter((one) => one.tagName === "P");
  if (single.length === 1 && made[0] === single[0]) made.splice(0, 1, ...single[0].childNodes); // a tight list
  if (task && made[0]?.nodeType === Node.TEXT_NODE) {
    made[0].textContent = made[0].textContent.slice(4);
    made.unshift(h("input", { type: "checkbox", disabled: true, checked: task[1] !== " " }), " ");
  }
  return made;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
  const align = cells(lines[1]).map((cell) => (/^:.*:$/.test(cell) ? "center" : /:$/.test(cell) ? "right" : ""));
  const row = (tag, line) => h("tr", {}, cells(line).map((cell, at) => h(tag, { class: align[at] || "" }, inline(cell))));
  return h("div", { class: "table-box", tabindex: 0 }, h("table", {}, h("thead", {}, row("th", lines[0])), h("tbody", {}, lines.slice(2).map((line) => row("td", line)))));
}

// ── inline ───────────────────────────────────────────────────────────────────────────────────────────

const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;

function inline(text, depth = 0) {
  if (depth > MAX_DEPTH) return [text];
  const made = [];
  const missing = new Set(); // markers without an end in the rest of this text: each is searched once, so the time stays linear
  let plain = 0;
  const put = (end, node, next) => {
    if (end > plain) made.push(text.slice(plain, end));
    if (node) made.push(node);
    plain = SPECIAL.lastIndex = next;
  };
  SPECIAL.lastIndex = 0;
  for (let found; (found = SPECIAL.exec(text));) {
    const [node, next] = inlineAt(text, found.index, missing, depth) || [];
    if (node) put(found.index, node, next);
    else SPECIAL.lastIndex = found.index + Math.max(1, runLength(text, found.index));
  }
  put(text.length, null, text.length);
  return made;
}

function runLength(text, at) {
  let end = at;
  while ("*_~`".includes(text[at]) && text[end] === text[at]) end++;
  return end - at;
}

function inlineAt(text, at, missing, depth) {
  const saved = SPECIAL.lastIndex;
  const inner = (from, to) => { const made = inline(text.slice(from, to), depth + 1); SPECIAL.lastIndex = saved; return made; };
  switch (text[at]) {
    case "\n": return [/ {2}$/.test(text.slice(Math.max(0, at - 2), at)) ? h("br") : document.createTextNode("\n"), at + 1];
    case "\\": return /[!-/:-@[-`{-~]/.test(text[at + 1] || "") ? [document.createTextNode(text[at + 1]), at + 2] : null;
    case "`": return codeSpan(text, at, missing);
    case "*": case "_": case "~": return emphasis(text, at, missing, inner);
    case "!": return text[at + 1] === "[" ? link(text, at + 1, inner, "picture: ") : null;
    case "[": return link(text, at, inner, "");
    case "<": return angleLink(text, at);
    default: return bareLink(text, at);
  }
}

function codeSpan(text, at, missing) {
  const marks = "`".repeat(runLength(text, at));
  if (missing.has(marks)) return null;
  let end = text.indexOf(marks, at + marks.length);
  while (end >= 0 && runLength(text, end) !== marks.length) end = text.indexOf(marks, end + runLength(text, end));
  if (end < 0) { missing.add(marks); return null; }
  return [h("code", {}, text.slice(at + marks.length, end).replace(/^ (.*) $/s, "$1")), end + marks.length];
}

function emphasis(text, at, missing, inner) {
  const mark = text[at];
  const width = Math.min(runLength(text, at), mark === "~" ? 2 : 3);
  const marks = mark.repeat(width);
  if (missing.has(marks) || (mark === "~" && width < 2) || /\s/.test(text[at + width] || " ")) return null;
  if (mark === "_" && /\w/.test(text[at - 1] || "")) return null;
  for (let end = text.indexOf(marks, at + width); end >= 0; end = text.indexOf(marks, end + 1)) {
    const run = runLength(text, end);
    if (width === 1 && run === 2) { end += 1; continue; } // belongs to strong text inside
    if (/\s/.test(text[end - 1]) || text[end - 1] === "\\" || (mark === "_" && /\w/.test(text[end + width] || ""))) continue;
    while (text[end + width] === mark) end++; // the last marker of a run
    const content = inner(at + width, end);
    const tags = mark === "~" ? ["del"] : [["em"], ["strong"], ["strong", "em"]][width - 1];
    return [tags.reduceRight((held, tag) => [h(tag, {}, held)], content)[0], end + width];
  }
  missing.add(marks);
  return null;
}

function link(text, at, inner, prefix) {
  const close = text.indexOf("](", at);
  if (close < 0 || close - at > 1000) return null;
  const end = closingBracket(text, close + 1);
  if (end < 0) return null;
  const url = text.slice(close + 2, end).trim().split(/\s+/)[0].replace(/^<|>$/g, "");
  const label = inner(at + 1, close);
  return safe(url) ? [anchor(url, prefix ? [prefix, ...label] : label), end + 1] : null;
}

/** Return the position of the parenthesis that closes the one at `at`; -1 if it is not within 2,000 characters. */
function closingBracket(text, at) {
  let depth = 0;
  for (let end = at; end < Math.min(text.length, at + 2000); end++) {
    if (text[end] === "(") depth++;
    if (text[end] === ")" && --depth === 0) return end;
  }
  return -1;
}

function angleLink(text, at) {
  const found = text.slice(at, at + 500).match(/^<((?:https?:\/\/|mailto:)[^\s<>]+)>/);
  return found && safe(found[1]) ? [anchor(found[1], [found[1]]), at + found[0].length] : null;
}

function bareLink(text, at) {
  const found = text.slice(at, at + 2000).match(/^https?:\/\/[^\s<>"'`]+/);
  const url = found?.[0].replace(/[.,;:!?)\]}*_~]+$/, "");
  return url && safe(url) ? [anchor(url, [url]), at + url.length] : null;
}

function safe(url) {
  try {
    return ["http:", "https:", "mailto:"].includes(new URL(url).protocol);
  } catch {
    return false;
  }
}

function anchor(url, label) {
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}

// ── syntax highlighting ──────────────────────────────────────────────────────────────────────────────

const CODE = new RegExp([
  "(?<comment>(?:#|//|--\\s)[^\\n]*|/\\*[^]{0,5000}?\\*/)",
  "(?<string>\"(?:[^\"\\\\\\n]|\\\\.){0,2000}\"|'(?:[^'\\\\\\n]|\\\\.){0,2000}'|`[^`]{0,5000}`)",
  "(?<number>\\b\\d[\\w.]*\\b)",
  "(?<word>\\b(?:and|as|async|await|break|case|catch|class|const|continue|def|do|elif|else|enum|except|export|extends|false|False|finally|fn|for|from|func|function|if|impl|import|in|interface|is|lambda|let|match|mut|new|nil|None|not|null|or|package|pass|pub|raise|return|self|static|struct|super|switch|this|throw|true|True|try|type|undefined|use|var|void|while|with|yield|SELECT|FROM|WHERE|INSERT|UPDATE|DELETE|JOIN|GROUP|ORDER|BY|CREATE|TABLE)\\b)",
].join("|"), "g");

function highlighted(code) {
  if (code.length > 50000) return [code];
  const made = [];
  let plain = 0;
  for (const found of code.matchAll(CODE)) {
    const kind = Object.keys(found.groups).find((name) => found.groups[name] !== undefined);
    made.push(code.slice(plain, found.index), h("span", { class: `code-${kind}` }, found[0]));
    plain = found.index + found[0].length;
  }
  return [...made, code.slice(plain)];
}
