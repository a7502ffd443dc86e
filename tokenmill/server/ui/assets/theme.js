// Applies the stored theme before the first paint. A classic script in the head, so that the page does not flash.
const storedTheme = localStorage.getItem("tokenmill-theme");
if (storedTheme === "light" || storedTheme === "dark") document.documentElement.dataset.theme = storedTheme;
