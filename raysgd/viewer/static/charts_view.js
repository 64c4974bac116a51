// The view of charts: the sections, in order.
"use strict";

addView({ name: "charts", title: "Charts" });
addSection("charts", { id: "runs", title: "Runs", show: showRuns, content: [h("div", { id: "runs" })] });
addSection("charts", { id: "errors", show: showErrors, content: [h("div", { id: "errors" })] });
addSection("charts", { id: "warnings", title: "Warnings", show: showWarnings, content: [h("div", { id: "warnings" })] });
addSection("charts", { id: "metrics", title: "Metrics", show: showMetrics, content: [
  h("div", { class: "bar" },
    h("label", {}, "Filter ", h("input", { type: "search", id: "filter", placeholder: "part of a name",
      oninput: event => { setState({ filter: event.target.value }); show("metrics"); } })),
    h("label", {}, "Horizontal ", h("select", { id: "x", onchange: event => { setZoom(null); setState({ x: event.target.value }); show("metrics", "pace"); } })),
    h("label", {}, "Smoothing ", h("input", { type: "range", id: "smooth", min: 0, max: 0.99, step: 0.01,
      oninput: event => { setState({ smooth: Number(event.target.value) }); show("metrics"); } }), h("output", { id: "smooth-value", for: "smooth" })),
    h("label", {}, h("input", { type: "checkbox", id: "log",
      onchange: event => { setState({ log: event.target.checked }); show("metrics"); } }), " logarithmic"),
    h("label", { title: "The range of a curve is that of 90 % of its values." }, h("input", { type: "checkbox", id: "clip",
      onchange: event => { setState({ clip: event.target.checked }); show("metrics"); } }), " clip outliers"),
    h("button", { type: "button", id: "reset", disabled: true, text: "Reset zoom", onclick: () => setZoom(null) }),
    h("button", { type: "button", id: "ungroup", hidden: true, onclick: () => { setState({ group: "" }); show("metrics"); } }),
    h("button", { type: "button", id: "more", hidden: true, onclick: () => { setState({ all: !state.all }); show("metrics"); } }),
    h("span", { class: "soft small", id: "metrics-count", role: "status" })),
  h("p", { class: "soft small screen", text: "Drag over a curve to zoom, double-click to see all of it. Press ? for the keys." }),
  h("p", { id: "metrics-note", class: "soft", role: "status" }),
  h("div", { class: "charts", id: "charts" })] });
addSection("charts", { id: "media", title: "Images, texts and histograms", show: showMedia, content: [h("div", { id: "media" })] });
addSection("charts", { id: "timeline", title: "Timeline", show: showTimeline, content: [h("div", { id: "timeline" })] });
addSection("charts", { id: "pace", title: "Data wait, pace and memory", show: showPace, content: [h("div", { class: "charts", id: "pace" })] });
addSection("charts", { id: "config", title: "Config", show: showConfig, content: [
  h("div", { class: "bar" }, h("label", { id: "only-different-label" }, h("input", { type: "checkbox", id: "only-different",
    onchange: event => { setState({ different: event.target.checked }); show("config"); } }), " only differences")),
  h("div", { id: "config" }),
  h("details", {}, h("summary", { text: "Environment: versions and machines" }), h("div", { id: "versions" }), h("div", { id: "hosts" })),
  h("details", {}, h("summary", { text: "Settings of the Trainer" }), h("div", { id: "settings" }))] });
addSection("charts", { id: "events", title: "Events", show: showEvents, content: [h("div", { id: "events" })] });
