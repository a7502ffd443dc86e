// The chosen theme, before the first paint: a plain script in the head, so that nothing flashes.
const kept = localStorage.getItem("tokenmill-theme");
if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
