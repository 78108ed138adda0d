/* The order of the search's results: how-to pages first, single results late, the changelog last. An index entry that
   equals the query comes before all others; the numbers below `score` are Sphinx's own. */
var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    if (docname.startsWith("howto/")) return score + 10;
    return docname.startsWith("project/") ? score - 30 : /^(results|notes|claims|coming_from)/.test(docname) ? score - 10 : score;
  },
  objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
