"""The files of the Flower app that a deployment hands to its SuperLink."""

from __future__ import annotations

APP = "symprune_app"
PROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "symprune-federation"
version = "1.0.0"
description = "{title} by symprune"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "symprune"

[tool.flwr.app.components]
serverapp = "{app}:server"
clientapp = "{app}:client"

[tool.flwr.app.config]
clients = {clients}
timeout = {timeout}
nodes = ""
attempt = ""
folder = {folder}
job = {job}
"""
CODE = '''"""The Flower app. symprune itself is installed on every machine."""

from symprune.fed.flower import client_app, resident, server_app, {main}

server = server_app({main})
client = client_app(resident("{client}"))
'''
CONNECTION = """[superlink]
default = "symprune"

[superlink.symprune]
address = "{host}:{port}"
root-certificates = {authority}
"""
