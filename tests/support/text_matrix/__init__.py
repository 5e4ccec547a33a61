"""Every route from text to tokens, compared with `transformers`."""
