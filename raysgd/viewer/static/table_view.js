// The view of all runs: a table with conditions, chosen columns, groups, titles, tags and notes.
"use strict";

addView({ name: "runs", title: "Runs" });
addState("q", "");
addState("column", []);
addState("sort", "");

const isEditable = document.documentElement.hasAttribute("data-editable");
const MOST_COMPARED = 50;

function chosenColumns(runs) {  // without a choice: what differs, and the first metrics
  if (state.column.length) return state.column.filter(column => splitColumn(column)[0] || Object.hasOwn(FIELDS, column));
  const all = columnsOf(runs), differing = differingConfigs(runs).slice(0, 4);
  const tags = runs.some(run => (run.row.tags || []).length) ? ["tags"] : [];
  return ["state", "iteration", "started", ...tags, ...differing, ...all.filter(column => column.startsWith("last:")).slice(0, 2)];
}
const found = () => { const tests = parseQuery(state.q); return listedRuns().filter(run => matchesAll(run, tests)); };

let tableColumns = [];
const runsGrid = new Grid({ label: "Runs", columns: () => tableColumns, sort: () => state.sort,
  setSort: sort => { setState({ sort }); show("all-runs"); }, actions: run => editButton(run) });
const editor = h("dialog", { class: "editor", "aria-labelledby": "editor-title", onclose: () => editor.remove() });

addSection("runs", { id: "all-runs", title: "All runs", show: showTable, content: [
  h("div", { class: "bar" },
    h("label", {}, "Find ", h("input", { type: "search", id: "q", placeholder: "text, lr>0.01, state=done, tag:best, -old",
      oninput: event => { setState({ q: event.target.value }); runsGrid.element.scrollTop = 0; show("all-runs"); } })),
    h("label", {}, "Group by ", h("select", { id: "group", onchange: event => { setState({ group: event.target.value }); show("all-runs"); } })),
    h("button", { type: "button", id: "compare-found", onclick: () => compareFound() }),
    h("button", { type: "button", id: "compare-none", text: "Compare none", onclick: () => chooseRuns([]) }),
    h("span", { class: "soft small", id: "runs-count", role: "status" })),
  h("details", { id: "columns" }, h("summary", { text: "Columns" }), h("div", { class: "bar" },
    h("label", {}, "Filter ", h("input", { type: "search", id: "column-filter", oninput: () => showColumns() })),
    h("button", { type: "button", text: "Standard columns", onclick: () => { setState({ column: [] }); show("all-runs"); } })),
    h("div", { id: "column-choice", class: "choices" })),
  h("div", { id: "groups" }), runsGrid.element] });

function showTable() {
  const all = listedRuns(), shown = found(), columns = tableColumns = chosenColumns(shown.length ? shown : all);
  if (document.activeElement !== byId("q")) byId("q").value = state.q;
  const configs = differingConfigs(all);
  fill(byId("group"), configs, () => [h("option", { value: "", text: "nothing" }), ...configs.map(column => h("option", { value: column, text: titleOf(column) }))]);
  byId("group").value = configs.includes(state.group) ? state.group : "";
  const unread = page.numUnread ? `, reading the reports of ${page.numUnread}` : "";
  byId("runs-count").textContent = `${shown.length} of ${all.length} runs, ${selectedCount()} compared${unread}`;
  byId("compare-found").textContent = `Compare ${shown.length > MOST_COMPARED ? `the first ${MOST_COMPARED}` : `all ${shown.length}`} found`;
  byId("compare-found").disabled = !shown.length;
  showColumns();
  fill(byId("groups"), [state.group, columns, shown.map(run => [run.id, run.row.version])], () => groupsOf(shown, columns));
  runsGrid.show(shown);
  runsGrid.element.hidden = !all.length;
  if (!all.length) byId("runs-count").textContent = MODE === "live" ? "There are no runs in this folder yet." : "No runs.";
}
const selectedCount = () => [...page.runs.values()].filter(run => run.isSelected).length;
function chooseRuns(runs) {
  const wanted = new Set(runs);
  for (const run of page.runs.values()) run.isSelected = wanted.has(run);
  runs.forEach((run, place) => { run.place = place; });
  keepSelection();
  poll();
}
function compareFound() { chooseRuns(runsGrid.runs.slice(0, MOST_COMPARED)); }

function showColumns() {
  const all = listedRuns(), columns = columnsOf(all), chosen = tableColumns, words = byId("column-filter").value.toLowerCase();
  const shown = columns.filter(column => titleOf(column).toLowerCase().includes(words)).slice(0, 200);
  if (!byId("columns").open && byId("column-choice").childElementCount) return;
  fill(byId("column-choice"), [shown, chosen], () => shown.map(column => {
    const box = h("input", { type: "checkbox", id: `column-${column}`, onchange: () => {
      setState({ column: box.checked ? [...tableColumns, column] : tableColumns.filter(other => other !== column) });
      show("all-runs");
    } });
    box.checked = chosen.includes(column);
    return h("label", {}, box, titleOf(column));
  }));
}
byId("columns").addEventListener("toggle", () => showColumns());

// -------------------------------------------------------------------------------------------------------------- groups

function groupsOf(runs, columns) {
  if (!state.group) return [];
  const metrics = columns.filter(column => !["", "config"].includes(splitColumn(column)[0]));
  const rows = groupRuns(runs, state.group).map(([value, members]) => [
    h("td", {}, h("button", { type: "button", class: "name", text: value, title: "Compare the runs of this group", onclick: () => chooseRuns(members.slice(0, MOST_COMPARED)) })),
    cell(String(members.length), "number"), ...metrics.map(column => {
      const values = members.map(run => valueOf(run, column)).filter(isFiniteNumber), show = value => shownValue(value, column);
      const mean = values.reduce((sum, each) => sum + each, 0) / values.length;
      return cell(values.length ? `${show(mean)}  (${show(Math.min(...values))} to ${show(Math.max(...values))})` : "–", "number");
    })]);
  return [table([titleOf(state.group), "runs", ...metrics.map(column => `${titleOf(column)}: mean (range)`)], rows, "Groups of runs"),
    h("p", { class: "soft small", text: "The charts of compared runs show the mean and the range of each group." })];
}

// ------------------------------------------------------------------------------------------- titles, tags, notes, delete

function editButton(run) {
  return isEditable && run.state !== "unreadable" ? h("button", { type: "button", class: "small", id: `edit-${run.id}`, "aria-label": `Edit ${run.name}`, text: "edit", onclick: () => edit(run) }) : null;
}
async function change(method, run, body) {
  const answer = await fetch(`api/runs/${run.id}`, { method, headers: { "X-Raysgd-Token": TOKEN, "Content-Type": "application/json" },
    body: body && JSON.stringify(body) });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
function edit(run) {
  const { row } = run, field = (label, element) => h("label", { class: "field" }, h("span", { text: label }), element);
  const title = h("input", { id: "edit-title", value: row.title || "" }), tags = h("input", { id: "edit-tags", value: (row.tags || []).join(", ") });
  const notes = h("textarea", { id: "edit-notes", rows: 5 });
  notes.value = row.notes || "";
  const problem = h("p", { class: "bad", role: "alert" }), name = pathOf(run);
  const attempt = async work => {
    try { await work(); editor.close(); await poll(true); byId(`edit-${run.id}`)?.focus(); } catch (error) { problem.textContent = textOf(error); }
  };
  const save = () => attempt(() => change("POST", run, { title: title.value, tags: tags.value.split(","), notes: notes.value }));
  const remove = h("button", { type: "button", class: "danger", text: "Delete the run…", onclick: () => {
    if (remove.dataset.asked) { attempt(() => change("DELETE", run)); return; }
    remove.dataset.asked = "1";
    remove.textContent = "Delete its folder with all checkpoints";
    problem.textContent = `This deletes ${row.run_dir}. It cannot be undone.`;
  } });
  editor.replaceChildren(h("form", { method: "dialog", onsubmit: event => { event.preventDefault(); save(); } },
    h("h2", { id: "editor-title", text: name }), field("Title", title), field("Tags, with commas between them", tags), field("Notes", notes), problem,
    h("div", { class: "bar" }, h("button", { type: "submit", text: "Save" }), h("button", { type: "button", text: "Cancel", onclick: () => editor.close() }), remove)));
  document.body.append(editor);
  editor.showModal();
}
