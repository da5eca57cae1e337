"""Published data sets from their files, as one tensorflow-datasets builder without TensorFlow.

Nothing is imported here: `from_files` is read for every task, tensorflow-datasets takes a while.
"""
