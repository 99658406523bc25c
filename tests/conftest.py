pytest_plugins = ["tests.servers", "tests.faulty"]
