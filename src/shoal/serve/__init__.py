"""Predictions of a trained or training model over gRPC and HTTP."""
