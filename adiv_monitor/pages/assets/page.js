"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // Light and dark: what the system says, until the reader says otherwise.
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = document.createElement("button");
  theme.type = "button";
  theme.className = "theme";
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const nameTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  theme.setAttribute("aria-label", "Switch between light and dark");
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  dark.addEventListener("change", nameTheme);
  nameTheme();
  document.querySelector(".top .wide").append(theme);

  // Tables: sorted by any column, blanks last.
  const key = (cell, text) => {
    const value = cell.dataset.value ?? cell.textContent.trim();
    if (text) return value;
    return value === "" || Number.isNaN(Number(value)) ? null : Number(value);
  };
  const sort = (table, column, header) => {
    const direction = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const text = "text" in header.dataset;
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [key(row.cells[column], text), row]);
    rows.sort(([a], [b]) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return direction * (text ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
    });
    body.append(...rows.map(([, row]) => row));
    all("th[aria-sort]", table).forEach((th) => th.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  };
  for (const table of all("table.sortable")) {
    [...[...table.tHead.rows].pop().cells].forEach((header, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sort";
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => sort(table, column, header));
    });
  }

  // Tables: rows by part of their names.
  for (const controls of all(".controls.script")) controls.hidden = false;
  for (const input of all("input.filter")) {
    const rows = [...byId(input.dataset.table).tBodies[0].rows];
    const names = rows.map((row) => row.cells[0].dataset.value.toLowerCase());
    const count = input.closest(".controls").querySelector(".count");
    input.addEventListener("input", () => {
      const part = input.value.trim().toLowerCase();
      let shown = 0;
      rows.forEach((row, i) => {
        row.hidden = !names[i].includes(part);
        shown += !row.hidden;
      });
      count.textContent = part ? `${shown} of ${rows.length}` : "";
    });
  }
  // A link to a row that is filtered out shows all rows again.
  const unhide = () => {
    const target = location.hash.startsWith("#layer-") && byId(location.hash.slice(1));
    if (!target || !target.hidden) return;
    const input = document.querySelector('input.filter[data-table="layer-table"]');
    input.value = "";
    input.dispatchEvent(new Event("input"));
    target.scrollIntoView();
  };
  addEventListener("hashchange", unhide);

  // What is folded is printed, too.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = all("details:not([open])");
    folded.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((details) => { details.open = false; }));

  // The heat map.
  const data = byId("heat-data") && JSON.parse(byId("heat-data").textContent);
  if (!data) return;
  const [box, grid, canvas, cursor] =
    ["heat-map", "heat-grid", "heat-canvas", "heat-cursor"].map(byId);
  const [choice, filter, value] = ["heat-measure", "heat-filter", "heat-value"].map(byId);
  const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const palettes = data.palettes.map((colours) => colours.map(rgb));
  const broken = rgb(getComputedStyle(root).getPropertyValue("--not-finite").trim());
  const steps = data.steps.length;
  const unpacked = new Map();
  let shown = data.layers.map((_, i) => i);
  let at = null; // [row, column] of the chosen cell

  const cells = (measure) => {
    if (!unpacked.has(measure)) {
      const bytes = Uint8Array.from(atob(measure.cells), (c) => c.charCodeAt(0));
      const words = new DataView(bytes.buffer);
      const width = measure.bytes;
      unpacked.set(measure, (i) =>
        width === 2 ? words.getUint16(2 * i, true) : words.getUint32(4 * i, true));
    }
    return unpacked.get(measure);
  };
  const measure = () => data.measures[choice.value];

  const draw = () => {
    const chosen = measure();
    const cell = cells(chosen);
    canvas.width = steps;
    canvas.height = Math.max(shown.length, 1);
    const colours = palettes[chosen.palette];
    const image = new ImageData(canvas.width, canvas.height);
    shown.forEach((layer, row) => {
      for (let column = 0; column < steps; column++) {
        const level = chosen.levels[cell(layer * steps + column)];
        const colour = level === -2 ? broken : colours[level];
        if (colour) image.data.set([...colour, 255], 4 * (row * steps + column));
      }
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
    const height = Math.max(2, Math.min(22, Math.floor(640 / Math.max(shown.length, 1))));
    canvas.style.height = `${height * shown.length}px`;
    label(height);
    byId("heat-reads").textContent = `${chosen.title}: ${chosen.reads}`;
    all("#heat-legend li").forEach((li) => { li.hidden = !chosen.marks.includes(li.dataset.mark); });
    byId("heat-low").textContent = chosen.low;
    byId("heat-high").textContent = chosen.high;
    const range = byId("heat-range");
    range.hidden = !chosen.healthy;
    if (chosen.healthy) {
      range.style.left = `${100 * chosen.healthy[0]}%`;
      range.style.right = `${100 * (1 - chosen.healthy[1])}%`;
    }
    const [first, last] = chosen.span;
    const ramp = colours.slice(first, last + 1);
    const scale = new ImageData(ramp.length, 1);
    ramp.forEach((colour, i) => scale.data.set([...colour, 255], 4 * i));
    byId("heat-colours").width = ramp.length;
    byId("heat-colours").getContext("2d").putImageData(scale, 0, 0);
    point();
  };

  const longest = Math.max(...data.layers.map((name) => name.length));
  const label = (height) => {
    byId("heat-labels").style.width = `${Math.max(longest, 8) + 2}ch`;
    const every = Math.max(1, Math.ceil(14 / height));
    const names = shown.map((layer, row) => [row, data.layers[layer] || "the model itself"]);
    byId("heat-labels").replaceChildren(...names.filter(([row]) => row % every === 0).map(([row, name]) => {
      const span = document.createElement("span");
      const inner = document.createElement("bdi");
      inner.textContent = name;
      span.append(inner);
      span.title = name;
      span.style.top = `${(row + 0.5) * height}px`;
      return span;
    }));
    const wanted = Math.max(1, Math.ceil(steps / Math.max(2, Math.floor(grid.clientWidth / 56))));
    byId("heat-steps").replaceChildren(...data.steps.map((step, i) => [step, i])
      .filter(([, i]) => i % wanted === 0).map(([step, i]) => {
        const span = document.createElement("span");
        span.textContent = i === 0 ? `step ${step}` : step;
        span.style.left = `${100 * (i + 0.5) / steps}%`;
        return span;
      }));
  };

  const point = () => {
    cursor.hidden = at === null || !shown.length;
    if (cursor.hidden) {
      value.textContent = shown.length ? byId("heat-help").textContent : "No layer has this in its name.";
      return;
    }
    at = [Math.max(0, Math.min(at[0], shown.length - 1)), Math.max(0, Math.min(at[1], steps - 1))];
    const [row, column] = at;
    const chosen = measure();
    const layer = shown[row];
    const text = chosen.texts[cells(chosen)(layer * steps + column)] || "not measured";
    value.replaceChildren(
      Object.assign(document.createElement("strong"), { textContent: text }),
      ` ${chosen.title.toLowerCase()} of `,
      Object.assign(document.createElement("bdi"),
        { className: "path", textContent: data.layers[layer] || "the model itself" }),
      ` at step ${data.steps[column]}`);
    cursor.style.left = `${100 * column / steps}%`;
    cursor.style.width = `${100 / steps}%`;
    cursor.style.top = `${100 * row / shown.length}%`;
    cursor.style.height = `${100 / shown.length}%`;
  };

  grid.addEventListener("pointermove", (event) => {
    const frame = grid.getBoundingClientRect();
    at = [
      Math.floor((event.clientY - frame.top) / frame.height * shown.length),
      Math.floor((event.clientX - frame.left) / frame.width * steps),
    ];
    point();
  });
  grid.addEventListener("focus", () => { at ??= [0, 0]; point(); });
  grid.addEventListener("keydown", (event) => {
    const [row, column] = at ?? [0, 0];
    const move = {
      ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
      ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1],
      Home: [row, 0], End: [row, steps - 1],
      PageUp: [row - 10, column], PageDown: [row + 10, column],
    }[event.key];
    if (move) {
      at = move;
      point();
      event.preventDefault();
    } else if (event.key === "Enter" && shown.length) goTo(shown[row]);
  });
  grid.addEventListener("click", () => { if (at && shown.length) goTo(shown[at[0]]); });
  const goTo = (layer) => {
    const rows = all("#layer-table tbody tr");
    const row = rows.find((found) => found.cells[0].dataset.value === data.layers[layer]);
    if (row) location.hash = row.id;
  };
  choice.addEventListener("change", draw);
  filter.addEventListener("input", () => {
    const part = filter.value.trim().toLowerCase();
    shown = data.layers.map((_, i) => i).filter((i) => data.layers[i].toLowerCase().includes(part));
    draw();
  });
  box.hidden = false;
  new ResizeObserver(draw).observe(byId("heat-map"));
})();
