"""Code that several tests share: fakes and oracles, no test cases."""
