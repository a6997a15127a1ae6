import pytest
from support.serving import Served


@pytest.fixture(scope="session")
def served(model_folders):
    """A server of the tiny pair, for tests that leave it as it is."""
    with Served(model_folders) as server:
        yield server


@pytest.fixture
def serve(model_folders):
    """Starts servers with options of their own, and stops them."""
    servers = []

    def start(*args, folders=model_folders, drafter=None):
        servers.append(Served(folders, *args, drafter=drafter))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
