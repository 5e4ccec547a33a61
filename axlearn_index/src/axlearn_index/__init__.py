"""Which distribution brings which name of axlearn-core's plugins: `index.json`, written when this package is built.

axlearn-core finds it through the entry-point group `axlearn.index` and reads the file without importing this package.
"""
