"""What is minimised and measured: the notebook's loss, step, weight and metrics, over batches.

``batches`` gives a model its arguments, ``one_pass`` is what goes through the model at once,
``weight`` and ``measures`` make averages of passes, ``whole_set`` keeps metrics that are computed
over all of data.eval.
"""
