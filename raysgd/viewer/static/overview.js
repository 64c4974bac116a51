// The runs of the page, which are selected here.
"use strict";

function showRuns() {
  const runs = [...page.runs.values()];
  const lastOf = run => { const rows = run.facts ? run.iterations.get() : []; const last = rows.length ? rows[rows.length - 1] : run.iteration; return last ? String(last) : "–"; };
  const startedOf = run => (run.facts ? run.facts.started : run.started);
  fill(byId("runs"), runs.map(run => [run.id, run.name, run.state, run.isSelected, run.style, lastOf(run), startedOf(run), Math.round(run.updated)]), () => {
    if (!runs.length) return h("p", { class: "soft", text: MODE === "live" ? "There are no runs in this folder yet." : "No runs." });
    return table(["compare", "run", "state", "iteration", "started", "last change"], runs.map(run => {
      const [text, kind] = stateOf(run.state);
      const box = h("input", { type: "checkbox", id: `select-${run.id}`, "aria-label": `Compare ${run.key}`, onchange: () => select(run, box.checked) });
      box.checked = run.isSelected;
      const line = swatch(run.style);
      line.style.visibility = run.isSelected ? "" : "hidden";
      return [h("td", {}, box), h("td", { class: "text" }, h("div", { class: "run" }, line, h("button", { type: "button", class: "name", id: `only-${run.id}`,
          text: run.key, title: "Show this run alone", onclick: () => selectOnly(run) }))),
        h("td", { class: kind, text }), cell(lastOf(run), "number"), cell(clock(startedOf(run)), ""), cell(clock(run.updated), "")];
    }), "List of runs");
  });
}
async function select(run, isSelected) {
  if (isSelected) {  // the first colour that no other run has
    const used = new Set([...page.runs.values()].filter(other => other.isSelected).map(other => other.place));
    run.place = 0;
    while (used.has(run.place)) run.place += 1;
  }
  run.isSelected = isSelected;
  keepSelection();
  if (isSelected) await poll();
}
async function selectOnly(run) {
  for (const other of page.runs.values()) other.isSelected = other === run;
  run.place = 0;
  keepSelection();
  await poll();
}
function keepSelection() {
  const runs = [...page.runs.values()].filter(run => run.isSelected).sort((a, b) => a.place - b.place);
  setState({ run: runs.map(run => run.key) });
  setZoom(null);
  show();
}
