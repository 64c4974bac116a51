// A table of runs that is sorted by its heads and draws only the rows in view.
"use strict";

const ROW_HEIGHT = 32, ROWS_BEYOND = 25;

class Grid {
  // options: {label, columns(): [column], sort(): text, setSort(text), actions(run): element}
  constructor(options) {
    Object.assign(this, { options, runs: [], from: -1, to: -1, key: "" });
    this.head = h("tr", { "aria-rowindex": 1 });
    this.body = h("tbody", {});
    this.table = h("table", { class: "grid", "aria-label": options.label }, h("thead", {}, this.head), this.body);
    this.element = h("div", { class: "scroll grid-scroll", tabindex: 0, role: "region", "aria-label": `Table: ${options.label}`, onscroll: () => this.drawRows() }, this.table);
  }
  show(runs) {  // runs in the order of the list
    const columns = this.options.columns(), sort = this.options.sort();
    const isDescending = sort.startsWith("-"), by = isDescending ? sort.slice(1) : sort;
    this.runs = by && (by === "name" || columns.includes(by)) ? [...runs].sort(by === "name"
      ? (a, b) => (isDescending ? -1 : 1) * a.name.localeCompare(b.name, undefined, { numeric: true }) : compareBy(by, isDescending)) : runs;
    this.table.setAttribute("aria-rowcount", this.runs.length + 1);
    const key = JSON.stringify([columns, sort]);
    if (key !== this.key) {
      this.key = key;
      const headOf = (column, title) => {
        const order = by !== column ? "none" : isDescending ? "descending" : "ascending";
        return h("th", { scope: "col", "aria-sort": order }, h("button", { type: "button", class: "head", "data-column": column, title,
          text: `${title}${order === "none" ? "" : isDescending ? " ▼" : " ▲"}`,
          onclick: () => this.options.setSort(by === column && !isDescending ? `-${column}` : by === column ? "" : column) }));
      };
      const focused = this.head.contains(document.activeElement) && document.activeElement.dataset.column;
      this.head.replaceChildren(h("th", { scope: "col" }, h("span", { class: "hidden-text", text: "compare" })), headOf("name", "run"),
        ...columns.map(column => headOf(column, titleOf(column))), ...(this.options.actions ? [h("th", { scope: "col" }, h("span", { class: "hidden-text", text: "actions" }))] : []));
      if (focused) [...this.head.querySelectorAll("button")].find(button => button.dataset.column === focused)?.focus();
    }
    this.from = -1;
    this.drawRows();
  }
  drawRows() {
    const first = Math.floor(this.element.scrollTop / ROW_HEIGHT), count = Math.ceil((this.element.clientHeight || 600) / ROW_HEIGHT);
    if (this.from >= 0 && first >= this.from + (this.from ? 5 : 0) && first + count <= this.to - (this.to < this.runs.length ? 5 : 0)) return;
    const from = Math.max(0, first - ROWS_BEYOND), to = Math.min(this.runs.length, first + count + ROWS_BEYOND);
    Object.assign(this, { from, to });
    const columns = this.options.columns();
    const focused = this.body.contains(document.activeElement) ? document.activeElement.id : "";
    const gap = size => {
      const filler = h("td", { colspan: columns.length + 3 });
      filler.style.height = `${size}px`;
      return size > 0 ? [h("tr", { class: "gap", "aria-hidden": true }, filler)] : [];
    };
    this.body.replaceChildren(...gap(from * ROW_HEIGHT), ...this.runs.slice(from, to).map((run, i) => this.rowOf(run, from + i, columns)),
      ...gap((this.runs.length - to) * ROW_HEIGHT));
    if (focused) byId(focused)?.focus({ preventScroll: true });
  }
  rowOf(run, place, columns) {
    const { row } = run, box = h("input", { type: "checkbox", id: `${this.options.label}-compare-${run.id}`, "aria-label": `Compare ${run.name}`,
      onchange: () => select(run, box.checked) });
    box.checked = run.isSelected;
    const line = swatch(run.style);
    line.style.visibility = run.isSelected ? "" : "hidden";
    const cells = columns.map(column => {
      const value = valueOf(run, column), text = shownValue(value, column), isNumber = typeof value === "number" || value === undefined;
      const kind = column === "state" ? stateTextOf(run)[1] : isNumber ? "number" : "";
      return h("td", { class: kind, title: column === "state" && row.why ? row.why : text.length > 24 ? text : null, text });
    });
    return h("tr", { "aria-rowindex": place + 2, class: run.isSelected ? "selected" : null }, h("td", {}, box),
      h("th", { scope: "row", title: row.run_dir || run.name }, line, h("button", { type: "button", class: "name", id: `${this.options.label}-only-${run.id}`,
        text: run.name, onclick: () => openRun(run) })), ...cells,
      ...(this.options.actions ? [h("td", {}, this.options.actions(run))] : []));
  }
}
function openRun(run) { selectOnly(run); openView("charts"); }
