"""From a batch's ids to pooled rows and back: in one process, or between ranks."""
