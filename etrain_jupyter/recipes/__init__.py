"""Recipes that the tutorials and their readers share: question answering, pretraining, images."""
