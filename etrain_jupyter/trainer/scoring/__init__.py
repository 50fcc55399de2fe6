"""Scores of the whole evaluation set: ``eval.predict`` and ``eval.score``.

``records`` packs what ``predict`` returns, ``spool`` keeps it on disk, ``set_scores`` evaluates
the set in parts and gathers the records, and ``score_process`` runs ``score`` in a separate
process, whose entry point is ``score_main``. ``exhibits`` converts what ``score`` returns.
"""
