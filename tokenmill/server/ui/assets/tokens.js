// An answer token by token: the less likely a token was, the stronger its shade. Its alternatives appear on hover.

import { h, replace } from "./dom.js";

const STEPS = 5; // number of the strongest shade; 0 is for likely tokens

export function readLogprobs(content) {
  return content.map((one) => [one.token, one.logprob, one.top_logprobs.map((other) => [other.token, other.logprob])]);
}

export function tokenView(tokens) {
  const card = h("div", { class: "token-card", hidden: true, role: "status" });
  const spans = tokens.map((token, at) => h("span", {
    class: `token shade-${shade(token[1])}`, tabindex: at ? -1 : 0,
    onmouseenter: (event) => show(card, event.target, token), onfocus: (event) => show(card, event.target, token),
    onmouseleave: () => { card.hidden = true; }, onblur: () => { card.hidden = true; },
  }, visible(token[0])));
  const box = h("div", { class: "token-box" }, h("div", { class: "token-text", "aria-label": "Tokens; arrow keys move" }, spans), card);
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && spans[spans.indexOf(document.activeElement) + step];
    if (next) { next.focus(); event.preventDefault(); }
  });
  return box;
}

function shade(logprob) {
  return Math.min(STEPS, Math.floor((1 - Math.exp(logprob)) * (STEPS + 0.999)));
}

function visible(text) {
  return text.replace(/\n/g, "⏎\n");
}

function show(card, span, [text, logprob, top]) {
  const isListed = top.some(([other]) => other === text);
  const rows = isListed ? top : [[text, logprob], ...top];
  replace(card, rows.map(([other, score]) => {
    const share = Math.exp(score);
    const bar = h("meter", { min: 0, max: 1, value: share, "aria-hidden": "true" });
    return h("div", { class: other === text ? "chosen" : "" }, h("code", {}, JSON.stringify(other).slice(1, -1)), bar, h("span", {}, `${(share * 100).toFixed(share < 0.1 ? 2 : 1)} %`));
  }));
  card.hidden = false;
  const box = card.parentElement.getBoundingClientRect();
  const at = span.getClientRects()[0];
  const hasRoom = at.bottom + card.offsetHeight + 12 < card.closest(".scroller").getBoundingClientRect().bottom;
  card.style.top = `${hasRoom ? at.bottom - box.top + 6 : at.top - box.top - card.offsetHeight - 6}px`;
  card.style.left = `${Math.max(0, Math.min(at.left - box.left, box.width - card.offsetWidth))}px`;
}
