// In the head of the document: the theme is known before anything is drawn.
"use strict";

const kept = {  // what one browser keeps for all pages; the frame of a notebook and some settings refuse it
  get(name) { try { return localStorage.getItem(`raysgd ${name}`); } catch { return null; } },
  set(name, value) { try { localStorage.setItem(`raysgd ${name}`, value); } catch { /* it lasts as long as the page */ } },
};
const THEMES = ["system", "light", "dark"];
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = THEMES.includes(kept.get("theme")) ? kept.get("theme") : "system";
const isDark = () => document.documentElement.dataset.theme === "dark";
function applyTheme(theme = chosenTheme) {
  document.documentElement.dataset.theme = theme === "system" ? (systemIsDark.matches ? "dark" : "light") : theme;
}
applyTheme();
