pytest_plugins = ["tests.servers", "tests.faulty", "tests.models"]
