"""Rendering of conversations by chat templates, and location of the text to train on."""
