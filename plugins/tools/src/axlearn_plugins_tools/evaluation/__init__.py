"""Evaluation: perplexity, bits per byte, multiple choice by log-likelihood; the command `axlearn evaluate`."""
