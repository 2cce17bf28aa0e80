// How search results are ordered: headings that are what was typed, guides, the reference, pages about the project.
// Sphinx adds up the points below for where a word was found. They are its own, because it takes all of them from here.
const later = { index: 12, examples: 5, architecture: 12, CONTRIBUTING: 12, changes: 12 };

var Scorer = {
  score: ([page, , , , points, , kind]) =>
    points + (kind === "title" ? 5 : 0) - (later[page] ?? (page.startsWith("reference/") ? 8 : 0)),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
