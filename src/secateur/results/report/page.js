"use strict";
(() => {
  const PAPER = 680; // pixels across a printed page
  const PAUSE = 1000; // milliseconds between questions for news
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const coarse = matchMedia("(pointer: coarse)");
  let figures = JSON.parse(document.getElementById("figures").textContent);
  let zoom = null; // what is seen of the run, in all charts along it
  let zooming = false;

  const shade = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // Colours are named in figures, and looked up when they are drawn.
  const paint = (value, key = "") => {
    if (Array.isArray(value)) return value.map((each) => paint(each, key));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, paint(each, name)]));
    }
    return /color/.test(key) && typeof value === "string" && value.startsWith("--") ? shade(value) : value;
  };

  const axis = (own, more) => {
    const lines = { gridcolor: shade("--rule"), linecolor: shade("--rule"), zerolinecolor: shade("--rule") };
    return { ...lines, automargin: true, ...own, ...more };
  };

  const layoutOf = (figure) => {
    const layout = paint(figure.layout);
    const printed = root.classList.contains("printed");
    return {
      height: 300,
      ...layout,
      ...(printed ? { width: PAPER } : { autosize: true }),
      xaxis: axis(layout.xaxis, figure.steps && zoom ? { range: zoom, autorange: false } : {}),
      yaxis: axis(layout.yaxis, {}),
      margin: { l: 48, r: 12, t: 12, b: 40 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: shade("--ink") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverdistance: -1,
      hoverlabel: { align: "left", namelength: -1 },
      legend: { orientation: "h", x: 0, yref: "container", y: 1, yanchor: "top" },
      modebar: { bgcolor: shade("--paper"), color: shade("--quiet"), activecolor: shade("--accent") },
      // A finger that moves over a chart is to scroll the page.
      dragmode: coarse.matches ? false : "zoom",
      uirevision: "kept",
    };
  };

  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: true,
    modeBarButtons: [["zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
  };

  const zoomed = (chart) => (change) => {
    const given = "xaxis.range[0]" in change ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : change["xaxis.range"];
    if (zooming || !(given || change["xaxis.autorange"])) return;
    zoom = given ? [...given] : null;
    zooming = true;
    const others = [...document.querySelectorAll(".chart")].filter((each) => each !== chart && each.steps);
    const told = zoom ? { "xaxis.range": zoom } : { "xaxis.autorange": true };
    Promise.all(others.map((each) => Plotly.relayout(each, told))).finally(() => (zooming = false));
  };

  // All at once, for paper cannot wait; or with a rest after each, for the reader.
  const draw = async (rest) => {
    for (const [id, figure] of Object.entries(figures)) {
      const chart = document.getElementById(id);
      if (!chart || !figure.data.length) continue;
      const fresh = !chart.data;
      const drawn = Plotly.react(chart, paint(figure.data), layoutOf(figure), config);
      chart.steps = figure.steps;
      if (fresh && figure.steps) chart.on("plotly_relayout", zoomed(chart));
      if (rest) await drawn.then(() => new Promise((resume) => setTimeout(resume)));
    }
  };

  const print = (on) => () => {
    root.classList.toggle("printed", on);
    draw(false);
  };

  const replace = (news) => {
    // Charts of metrics that were unknown when the page was loaded.
    if (Object.keys(news.figures).some((id) => !document.getElementById(id))) location.reload();
    const next = new DOMParser().parseFromString(news.body, "text/html");
    for (const part of document.querySelectorAll("[data-part]")) {
      const other = next.getElementById(part.id);
      if (!other) continue;
      part.hidden = other.hidden;
      if (part.dataset.part === "all" && part.innerHTML !== other.innerHTML) part.innerHTML = other.innerHTML;
    }
    figures = news.figures;
    return draw(true);
  };

  let heard = "";
  const listen = async () => {
    const trouble = document.getElementById("trouble");
    let said = "";
    try {
      const answer = await (await fetch("news", { cache: "no-store" })).text();
      const news = JSON.parse(answer);
      said = news.error ?? "";
      if (!said && answer !== heard) {
        heard = answer;
        await replace(news);
      }
    } catch {
      said = "No answer from the command that serves this page: these are the last numbers it told.";
    }
    trouble.textContent = said;
    trouble.hidden = !said;
    setTimeout(listen, PAUSE);
  };

  dark.addEventListener("change", () => draw(true));
  addEventListener("beforeprint", print(true));
  addEventListener("afterprint", print(false));
  draw(true).then(() => {
    root.dataset.drawn = "yes";
    if ("live" in document.body.dataset) setTimeout(listen, PAUSE);
  });
})();
