"""Properties that `axlearn prove` checks; see `axlearn_plugins_verify.prove.contract`."""
