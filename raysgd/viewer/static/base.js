// Elements and formats. Whatever a run contains reaches the document as text, never as markup.
"use strict";

const byId = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else if (name.startsWith("aria-") && typeof value === "boolean") element.setAttribute(name, String(value));
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(child => child !== null && child !== undefined));
  return element;
}
function svg(tag, props, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function number(value, digits = 5) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-4 || size >= 1e7) ? Number(value.toPrecision(digits)).toExponential() : String(Number(value.toPrecision(digits)));
}
function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${number(value * 1000, 3)} ms`;
  if (value < 100) return `${number(value, 3)} s`;
  const whole = Math.round(value), hours = Math.floor(whole / 3600), rest = String(whole % 60).padStart(2, "0");
  const minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest} h` : `${minutes}:${rest} min`;
}
// The distances of ticks on an axis of seconds, and the texts of ticks, all with one unit.
const TIME_STEPS = [...[-9, -8, -7, -6, -5, -4, -3, -2, -1].flatMap(power => [1, 2, 5].map(digit => Number(`${digit}e${power}`))), 1, 2, 5, 10, 15, 30, 60, 120, 300,
  600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, ...[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map(days => days * 86_400)];
function secondTicks(values) {
  const largest = Math.max(...values.map(Math.abs));
  const two = value => String(value).padStart(2, "0");
  const step = values.length > 1 ? values[1] - values[0] : largest;
  const textOf = value => {
    if (largest < 1e-3) return `${number(value * 1e6)} \u00b5s`;
    if (largest < 1) return `${number(value * 1e3)} ms`;
    if (largest < 120 || value < 0 || step < 1) return `${number(value)} s`;
    const whole = Math.round(value), minutes = Math.floor(whole / 60);
    if (largest < 7200) return `${minutes}:${two(whole % 60)} min`;
    return `${Math.floor(minutes / 60)}:${two(minutes % 60)}${step < 60 ? `:${two(whole % 60)}` : ""} h`;
  };
  return values.map(textOf);
}
const WHOLE_STEPS = Array.from({ length: 16 }, (_, power) => [1, 2, 5].map(digit => digit * 10 ** power)).flat();
// The places of ticks, some `count` of them; uPlot's own have no steps below 1e-16, and none above 1e32.
function ticksOf(min, max, count, steps = null) {
  const least = (max - min) / count, power = 10 ** Math.floor(Math.log10(least));
  const step = steps?.find(length => length >= least) ?? [1, 2, 5, 10].find(digit => digit * power >= least * 0.999) * power;
  const first = Math.ceil(min / step - 1e-9), found = [];
  for (let i = first; i * step <= max + 1e-9 * step && found.length < 50; i++) found.push(Number((i * step).toPrecision(15)));
  return found;
}
function logTicksOf(min, max, count) {
  const first = Math.floor(Math.log10(min)), last = Math.ceil(Math.log10(max)), stride = Math.ceil((last - first) / count);
  const powers = Array.from({ length: Math.floor((last - first) / stride) + 1 }, (_, i) => first + i * stride);
  const digits = last - first <= 3 ? [1, 2, 5] : [1];
  return powers.flatMap(power => digits.map(digit => Number(`${digit}e${power}`))).filter(value => value >= min * 0.999 && value <= max * 1.001);
}
function tickTexts(values, format) {  // with as many digits as the distance of two ticks needs
  if (format === seconds) return secondTicks(values);
  const steps = values.slice(1).map((value, i) => value - values[i]), largest = Math.max(...values.map(Math.abs));
  const digits = steps.length ? Math.min(15, Math.ceil(Math.log10(largest / Math.min(...steps))) + 1) : 5;
  return values.map(value => format(value, Math.max(digits, 3)));
}
function bytes(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${number(value, digits)} ${units[unit]}`;
}
const percent = (value, digits = 3) => value === null || value === undefined ? "–" : `${number(value * 100, digits)} %`;
const clock = time => time ? new Date(time * 1000).toLocaleString() : "–";
const STATES = { done: ["done", "good"], stopped: ["stopped by a callback", "good"], cancelled: ["cancelled", "warn"],
                 error: ["failed", "bad"], live: ["live", "good"], paused: ["paused", "warn"],
                 silent: ["no end, silent", "warn"], unreadable: ["cannot be read", "bad"] };
const stateOf = name => Object.hasOwn(STATES, name) ? STATES[name] : [String(name), "soft"];
function formatOf(name) {
  if (/(^|[_/])bytes$/.test(name)) return bytes;
  if (/_fraction$/.test(name)) return percent;
  if (/_s$/.test(name)) return seconds;
  return number;
}
function unitOf(name) {
  if (/(^|[_/])bytes$/.test(name)) return "bytes";
  if (/_percent$/.test(name)) return "%";
  if (/_fraction$/.test(name)) return "fraction";
  if (/_per_s$/.test(name)) return "1/s";
  if (/_ms$/.test(name)) return "ms";
  if (/_s$/.test(name)) return "s";
  return "";
}

// ------------------------------------------------------------------------------------------------------------ tables

const cell = (text, kind) => h("td", { class: kind || "text", text });
function table(heads, rows, label) {
  const first = rows.length ? (rows[0] instanceof Node ? [...rows[0].children] : rows[0]) : [];
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label || heads.join(", ") },
    h("table", {}, h("thead", {}, h("tr", {}, ...heads.map((head, place) => h("th", { scope: "col", class: first[place]?.className === "number" ? "number" : null, text: head })))),
      h("tbody", {}, ...rows.map(row => row instanceof Node ? row : h("tr", {}, ...row)))));
}
// Fill an element if what it shows has changed. Open details, scroll positions and the focus stay.
function fill(parent, shown, make) {
  const key = JSON.stringify(shown);
  if (parent.shown === key) return;
  parent.shown = key;
  const keyOf = element => element.dataset.key || element.id || element.getAttribute("aria-label") || element.textContent;
  const open = new Set([...parent.querySelectorAll("details[open]")].map(keyOf));
  const closed = new Set([...parent.querySelectorAll("details:not([open])")].map(keyOf));
  const places = new Map([...parent.querySelectorAll(".scroll")].map(found => [keyOf(found), [found.scrollTop, found.scrollLeft]]));
  const focused = parent.contains(document.activeElement) ? document.activeElement : null;
  const focusKey = focused && (focused.tagName === "SUMMARY" ? keyOf(focused.parentElement) : keyOf(focused));
  parent.replaceChildren(...[make()].flat());
  for (const found of parent.querySelectorAll("details")) {
    if (open.has(keyOf(found))) found.open = true;
    else if (closed.has(keyOf(found))) found.open = false;
  }
  for (const found of parent.querySelectorAll(".scroll")) {
    if (places.has(keyOf(found))) [found.scrollTop, found.scrollLeft] = places.get(keyOf(found));
  }
  if (!focused) return;
  for (const found of parent.querySelectorAll("summary, button, input, [tabindex]")) {
    if (focusKey === (found.tagName === "SUMMARY" ? keyOf(found.parentElement) : keyOf(found))) { found.focus({ preventScroll: true }); break; }
  }
}

