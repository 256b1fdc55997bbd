"""Language models after pre-training: samples of a model that is trained, choice of answers, means of models."""
