"""Evaluation of models on texts, conversations and multiple-choice questions."""
