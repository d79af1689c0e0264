"use strict";

// Filters: an entry is shown when it satisfies all of them; without this script everything is.
const filters = document.getElementById("filters");
const form = filters.querySelector("form");
const entries = [...document.querySelectorAll("[data-target]")].map((element) => ({
  element,
  contents: document.querySelector(`[data-for="${element.id}"]`),
  text: `${element.id} ${element.textContent}`.toLowerCase(),
}));

function matches({ element, text }, wanted) {
  const { paper, status, claims } = element.dataset;
  return (
    (!wanted.paper || paper === wanted.paper) &&
    (!wanted.status || status === wanted.status) &&
    (!wanted.claims || claims.split(" ").includes(wanted.claims)) &&
    wanted.text.toLowerCase().split(/\s+/).every((word) => text.includes(word))
  );
}

function apply() {
  const wanted = Object.fromEntries(new FormData(form));
  let shown = 0;
  for (const entry of entries) {
    const hidden = !matches(entry, wanted);
    entry.element.hidden = hidden;
    if (entry.contents) entry.contents.hidden = hidden;
    shown += hidden ? 0 : 1;
  }
  for (const group of document.querySelectorAll(".pending, [data-section], nav details")) {
    const members = group.closest("nav") ? group.querySelectorAll("[data-for]") : group.querySelectorAll("[data-target]");
    group.hidden = [...members].every((member) => member.hidden);
  }
  document.getElementById("nothing").hidden = shown > 0;
  form.querySelector("output").value = `${shown} of ${entries.length} shown`;
}

form.addEventListener("input", apply);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(apply));
filters.hidden = false;
if (window.matchMedia("(max-width: 60rem)").matches) document.querySelector("nav details").open = false;
if (window.matchMedia("(max-width: 40rem)").matches) filters.open = false;
apply();
