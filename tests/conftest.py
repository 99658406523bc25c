pytest_plugins = ["tests.servers", "tests.faulty", "tests.models", "tests.side_by_side"]
