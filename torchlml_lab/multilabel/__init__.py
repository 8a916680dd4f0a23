"""Multi-label classification on your own files: predict the top k labels from texts or numeric features."""
