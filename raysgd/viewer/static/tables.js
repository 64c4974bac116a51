// Why a run failed, its warnings, config, environment and events, as tables.
"use strict";

const KINDS = { failure: "bad", hang: "bad", mismatch: "bad", controller_restart: "bad", straggler: "warn", preemption: "warn",
                resize: "accent", paused: "soft", resumed: "soft", stop: "soft", cancel: "bad", regroup: "soft" };
addState("different", false);

function comparison(part, label) {
  const runs = selected(), keys = new Set();
  for (const run of runs) for (const key of Object.keys(run.facts[part])) keys.add(key);
  const rows = [];
  for (const key of keys) {
    const values = runs.map(run => (Object.hasOwn(run.facts[part], key) ? run.facts[part][key] : undefined));
    const differs = runs.length > 1 && new Set(values).size > 1;
    if (state.different && runs.length > 1 && !differs) continue;
    rows.push(h("tr", differs ? { class: "differs" } : {}, h("td", { class: "text", text: key }),
      ...values.map(value => cell(value === undefined ? "–" : value))));
  }
  if (!keys.size) return h("p", { class: "soft", text: "None." });
  if (!rows.length) return h("p", { class: "soft", text: "No differences." });
  return table(["name", ...runs.map(run => runs.length > 1 ? run.name : "value")], rows, label);
}

function showConfig(runs) {
  byId("only-different-label").hidden = runs.length < 2;
  byId("only-different").checked = state.different;
  for (const [part, label] of [["config", "Values of the config"], ["versions", "Versions"], ["settings", "Settings"]]) {
    fill(byId(part), [runs.map(run => [run.id, run.name, run.facts[part]]), state.different], () => comparison(part, label));
  }
  fill(byId("hosts"), runs.map(run => [run.name, run.facts.workers]), () => runs.map(run => h("div", {},
    runs.length > 1 ? h("h3", { text: run.name }) : null,
    h("ul", { class: "plain small" }, ...run.facts.workers.map(text => h("li", { text }))))));
  return runs.length > 0;
}
function showWarnings(runs) {
  const warned = runs.filter(run => run.facts.num_warnings);
  fill(byId("warnings"), warned.map(run => [run.name, run.facts.warnings, run.facts.num_warnings]), () => warned.map(run => {
    const { warnings: texts, num_warnings: count } = run.facts;
    return h("div", {}, runs.length > 1 ? h("h3", { text: run.name }) : null,
      h("ul", { class: "plain" }, ...texts.map(text => h("li", { text }))),
      count > texts.length ? h("p", { class: "soft", text: `and ${count - texts.length} more` }) : null);
  }));
  return warned.length > 0;
}
function showErrors(runs) {
  const failed = runs.filter(run => run.facts.error);
  fill(byId("errors"), failed.map(run => [run.name, run.facts.error]), () => failed.map(showError));
}
function showEvents(runs) {
  fill(byId("events"), runs.map(run => [run.id, run.name, runs.length, run.factsVersion]), () => runs.map(eventsOf));
  return runs.length > 0;
}
function showError(run) {
  const error = run.facts.error, isError = run.state === "error";
  const place = error.rank !== null && error.rank !== undefined ? ` on rank ${error.rank}${error.node ? `, ${error.node}` : ""}` : "";
  return h("section", { class: "error", "aria-label": "Error" },
    h("h2", { class: isError ? "bad" : "warn", text: `${run.name} ${isError ? "failed" : "was cancelled"}` }),
    h("p", {}, h("strong", { text: error.title + place })),
    error.message ? h("p", { text: error.message }) : null,
    error.traceback ? h("pre", { tabindex: 0, "aria-label": "Traceback", text: error.traceback }) : null,
    error.followed.length ? h("div", {}, h("p", { text: "Errors that followed on other ranks:" }),
      h("ul", { class: "plain" }, ...error.followed.map(([rankNumber, line]) => h("li", { text: `rank ${rankNumber}: ${line}` })))) : null);
}
function eventsOf(run) {
  const { events, num_events: count } = run.facts.timeline, started = run.facts.started;
  const rows = events.slice(-500).reverse().map(event => h("tr", {}, h("td", { class: "number", text: seconds(event.time - started) }),
    h("td", { class: KINDS[event.kind] === "bad" ? "bad" : "", text: event.kind.replaceAll("_", " ") }),
    h("td", { class: "text" }, event.text, ...Object.entries(event.stacks || {}).map(([rankNumber, stack]) =>
      h("details", { "data-key": `${run.id} stack ${event.time} ${rankNumber}` }, h("summary", { text: `stack of rank ${rankNumber}` }), h("pre", { tabindex: 0, text: stack }))))));
  return h("details", { "data-key": `${run.id} events`, open: selected().length === 1 },
    h("summary", { text: `${run.name}: ${count} event${count === 1 ? "" : "s"}${count > rows.length ? `, the last ${rows.length} shown` : ""}` }),
    table(["after", "event", "details"], rows, `Events of ${run.name}, newest first`));
}

