"""HRM and TRM, small recurrent reasoning models, on Shoal's public API."""
