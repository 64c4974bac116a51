// What the page shows is in its address, so that a reload, a bookmark and a link show the same: #/VIEW/ARGUMENT?NAME=VALUE.
//
// A file that adds a view declares it, its sections and its state:
//   addView({ name: "search", title: "Searches" });
//   addSection("search", { id: "trials", title: "Trials", content: [...], show: () => isThereAny });
//   addState("sort", "name");   setState({ sort: "loss" });   viewLink("search", "tune/asha", "Look at the search");
"use strict";

const state = {}, initialState = {};
const views = new Map();
let shownView = null, viewArgument = "";

// Declares a part of the address. Its first value says of which type it is: text, number, boolean, or a list of texts.
function addState(name, initial) { initialState[name] = initial; state[name] = initial; }

// A view of the page: a link in the header if it has a title, and the address #/NAME, with an argument #/NAME/ARGUMENT.
function addView({ name, title }) {
  const link = title ? viewLink(name, "", title) : null;
  const view = { name, sections: [], link, element: h("div", { id: `view-${name}`, hidden: true }) };
  byId("views").append(view.element);
  if (link) byId("navigation").append(link);
  views.set(name, view);
  byId("navigation").hidden = views.size < 2;
}

// A section of a view. show(runs, argument) fills it with what is new of the selected runs; false hides the section.
function addSection(viewName, { id, title, content = [], show }) {
  const heading = title ? [h("h2", { id: `h-${id}`, text: title })] : [];
  const element = h(title ? "section" : "div", { id: `${id}-section`, "aria-labelledby": title ? `h-${id}` : null }, ...heading, ...content);
  views.get(viewName).element.append(element);
  views.get(viewName).sections.push({ id, element, show });
}

// Shows what has changed in the view that is shown, or in some of its sections.
function show(...ids) {
  const runs = selected();
  for (const section of shownView.sections) {
    if (!ids.length || ids.includes(section.id)) section.element.hidden = section.show(runs, viewArgument) === false;
  }
}

function addressOf(view, argument) {
  const query = new URLSearchParams();
  for (const [name, initial] of Object.entries(initialState)) {
    const value = state[name];
    if (Array.isArray(initial)) for (const part of value) query.append(name, part);
    else if (value !== initial) query.set(name, value === true ? "1" : value === false ? "0" : value);
  }
  const path = argument ? `${view}/${encodeURIComponent(argument)}` : view;
  return `#/${path}${query.size ? `?${query}` : ""}`;
}
function readAddress() {
  const [path, text = ""] = location.hash.slice(1).split("?"), query = new URLSearchParams(text);
  const [, name = "", argument = ""] = path.split("/");
  shownView = views.get(name) || views.values().next().value;
  try { viewArgument = decodeURIComponent(argument); } catch { viewArgument = argument; }
  for (const [key, initial] of Object.entries(initialState)) {
    const found = query.get(key);
    if (Array.isArray(initial)) state[key] = query.getAll(key);
    else if (typeof initial === "boolean") state[key] = found === null ? initial : found === "1";
    else if (typeof initial === "number") state[key] = found !== null && Number.isFinite(Number(found)) ? Number(found) : initial;
    else state[key] = found ?? initial;
  }
  for (const view of views.values()) {
    view.element.hidden = view !== shownView;
    if (view.link) view === shownView ? view.link.setAttribute("aria-current", "page") : view.link.removeAttribute("aria-current");
  }
}

let writing = null;  // browsers bear some hundred changes of an address in a minute
function setState(changes) {
  Object.assign(state, changes);
  clearTimeout(writing);
  writing = setTimeout(writeAddress, 150);
}
function writeAddress() {
  clearTimeout(writing);
  try { history.replaceState(null, "", addressOf(shownView.name, viewArgument)); } catch { /* the frame of a notebook has no address */ }
}

function openView(view, argument = "") { writeAddress(); location.hash = addressOf(view, argument); }

// A link to a view, which shows there what is shown here: the same runs, axis and so on.
function viewLink(view, argument, text) {
  const follow = event => { writeAddress(); event.currentTarget.setAttribute("href", addressOf(view, argument)); };
  return h("a", { href: `#/${view}`, text, onpointerdown: follow, onclick: follow });
}
