// Keys of the page and the list of them, and the choice of the theme.
"use strict";

const keys = new Map();  // key -> {text, act}
function addKey(key, text, act) { keys.set(key, { text, act }); }
let keysAreOn = kept.get("keys") !== "off";

function moveToChart(step) {
  const charts = [...shownView.element.querySelectorAll(".chart")], at = charts.indexOf(document.activeElement?.closest(".chart"));
  charts[Math.min(Math.max(at + step, 0), charts.length - 1)]?.focus();
}
function chooseTheme(theme) {
  chosenTheme = theme;
  kept.set("theme", theme);
  byId("theme").value = theme;
  applyTheme();
  show();
}
const press = id => () => byId(id).checkVisibility() && byId(id).click();
addKey("?", "show these keys", () => byId("keys").showModal());
addKey("/", "search or filter", () => shownView.element.querySelector("input[type=search]")?.focus());
addKey("j", "next chart", () => moveToChart(1));
addKey("k", "previous chart", () => moveToChart(-1));
addKey("x", "choose the horizontal axis", () => byId("x").focus());
addKey("s", "smoothing: then the arrow keys", () => byId("smooth").focus());
addKey("l", "logarithmic, or not", press("log"));
addKey("o", "clip outliers, or not", press("clip"));
addKey("m", "more or fewer charts", press("more"));
addKey("0", "reset zoom", press("reset"));
addKey("t", "next theme: system, light, dark", () => chooseTheme(THEMES[(THEMES.indexOf(chosenTheme) + 1) % THEMES.length]));
const CHART_KEYS = [["+ -", "zoom in, zoom out"], ["\u2190 \u2192", "move to the left, to the right"], ["Shift \u2190 \u2192", "values to the left, to the right"], ["0 Esc", "show all"], ["Enter", "of time: show the moment in the timeline"]];

addEventListener("keydown", event => {
  const isTyping = event.target.closest?.("input:not([type=checkbox], [type=range]), select, textarea, dialog");
  if (!keysAreOn || isTyping || event.ctrlKey || event.metaKey || event.altKey || !keys.has(event.key)) return;
  event.preventDefault();
  keys.get(event.key).act();
});

function makeTools() {
  const rows = all => all.map(([key, text]) => h("tr", {}, h("td", {}, ...key.split(" ").map(part => h("kbd", { text: part }))), h("td", { text })));
  const isOn = h("input", { type: "checkbox", id: "keys-on", onchange: () => { keysAreOn = isOn.checked; kept.set("keys", keysAreOn ? "on" : "off"); } });
  isOn.checked = keysAreOn;
  const dialog = h("dialog", { id: "keys", "aria-labelledby": "h-keys" }, h("h2", { id: "h-keys", text: "Keys" }),
    h("table", {}, h("tbody", {}, ...rows([...keys].map(([key, { text }]) => [key, text])))),
    h("h3", { text: "In a chart" }), h("table", {}, h("tbody", {}, ...rows(CHART_KEYS))),
    h("p", {}, h("label", {}, isOn, " the keys above are on")), h("button", { type: "button", text: "Close", onclick: () => dialog.close() }));
  document.body.append(dialog);
  const theme = h("select", { id: "theme", onchange: event => chooseTheme(event.target.value) }, ...THEMES.map(name => h("option", { value: name, text: name })));
  theme.value = chosenTheme;
  byId("tools").append(h("label", {}, "Theme ", theme),
    h("button", { type: "button", text: "Keys", "aria-haspopup": "dialog", onclick: () => dialog.showModal() }));
}
