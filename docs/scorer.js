/* In which order the search shows pages: the ideas first, single results late, and the changelog last. The numbers
   below `score` are Sphinx's own. */
var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    if (docname.startsWith("ideas/")) return score + 20;
    return docname.startsWith("project/") ? score - 30 : /^(results|notes)\//.test(docname) ? score - 10 : score;
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
