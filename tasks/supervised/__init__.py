"""Supervised tasks: language models, classifiers, embeddings, rerankers."""
