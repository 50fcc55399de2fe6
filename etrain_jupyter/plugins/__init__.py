"""The plug-ins of this package, one folder each. The core imports none of them.

Each folder can be removed, because the core finds plug-ins by their entry points; see
``etrain_jupyter.plugin``.
"""
