"""Discovery of servers of models under the names of Monolith's `agent_service`."""
