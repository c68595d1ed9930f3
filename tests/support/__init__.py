"""What several tests share: stand-ins and oracles, no test cases."""
