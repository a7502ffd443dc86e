"""Code shared by several test files: small models, servers, engines and inputs. It contains no tests."""
