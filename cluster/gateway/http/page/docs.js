"use strict";

SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  // Otherwise the page asks a server of Swagger's to check the document.
  validatorUrl: null,
});
